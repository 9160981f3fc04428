"""generate_batch: stock's tokens from our layers around stock's paged attention, and the model as before afterwards."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext

import pytest

import hf_rocm
from hf_rocm import ops
from hf_rocm.generation.state import known
from hf_rocm.layers import decoder
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.overlay import bind
from tests.coverage.hits import counted
from tests.generation.conftest import make, recorded_on_cpu, suspect_gpu  # noqa: F401 - fixtures
from tests.serving.batching import (
    EAGER,
    NEW,
    batch,
    gives_back,
    memory_is_known,
    needs_batching,
    one_by_one,
    paged,
    prompts,
)

pytestmark = needs_batching

# a tied gemma3 answers with the prompt's last token, whatever its attention sees
KINDS = {"llama": {}, "qwen3": {}, "gemma3": {"tie_word_embeddings": False}, "mixtral": {}}
ATTENTION = {"attention", "decode_attention", "varlen_attention"}


@pytest.fixture
def everywhere(monkeypatch):
    """The overlays of a model bound for every instance, as installed ones are, until the test ends."""
    monkeypatch.setenv("HF_ROCM_FORCE", "1")

    def bound(kind):
        hf_rocm.activate(kind)

    yield bound
    hf_rocm.deactivate()


def attention_layers(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_model_gives_stocks_tokens_with_stocks_attention_between_our_layers(kind):
    stock = make(kind, **KINDS[kind])
    ours = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    with paged(stock):
        expected = batch(stock, prompts())
    assert all(len(set(each)) > NEW / 3 for each in expected)  # else equal tokens would prove little

    with paged(ours), ops.recording() as routes, counted() as hits:
        actual = batch(ours, prompts())
        reasons = {noted(module) for module in attention_layers(ours)}
        told = hf_rocm.explain(ours).details()
    assert actual == expected

    layers = ours.config.num_hidden_layers
    ran = Counter(each.operation for each in routes)
    assert not ATTENTION & ran.keys()
    assert all(bind.mode_of(module) == bind.ON for module in attention_layers(ours))
    decoders = sum(count for name, count in hits.items() if name.endswith("DecoderLayer"))
    assert decoders >= layers * NEW and ran["rms_norm"] + ran["add_rms_norm"] >= 2 * decoders
    assert ran["experts" if kind == "mixtral" else "act_and_mul"] == decoders
    (reason,) = reasons  # all layers stayed stock, for one reason
    assert reason is not None and ("sdpa_paged" in reason or "paged|" in reason or "cache" in reason)
    assert f"last call stock × {layers}: {reason}" in told


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_norms_that_would_ride_along_are_done_before_stocks_attention(kind, monkeypatch):
    """With few rows on a GPU a layer hands on its input unnormed, to be normed by the products; stock's can't."""
    model = make(kind)
    expected = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    monkeypatch.setattr(decoder, "can_fuse", lambda x: True)
    with paged(model), ops.recording() as routes:
        assert batch(model, prompts()) == expected
    assert any(each.operation == "fused_linear" for each in routes)  # of the MLP
    assert not any(each.operation in ATTENTION for each in routes)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_overlays_alone_give_stocks_tokens(kind, everywhere):
    model = make(kind)
    with paged(model):
        expected = batch(model, prompts())
        everywhere(kind)
        with ops.recording() as routes, counted() as hits:
            assert batch(model, prompts()) == expected
    ran = Counter(each.operation for each in routes)
    decoders = sum(count for name, count in hits.items() if name.endswith("DecoderLayer"))
    assert decoders >= model.config.num_hidden_layers * NEW
    assert ran["rms_norm"] and ran["add_rms_norm"] == decoders and not ATTENTION & ran.keys()


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "stock"])
def test_batches_and_one_by_one_agree_and_generate_is_served_again_afterwards(prepared):
    model = make("llama")
    expected = one_by_one(model, prompts())
    if prepared:
        hf_rocm.prepare(model, force=True)
    own = model.config._attn_implementation
    with paged(model):
        assert batch(model, prompts()) == expected
    assert model.config._attn_implementation == own == "sdpa"
    with ops.recording() as routes:
        assert one_by_one(model, prompts()) == expected
    served = sum(each.operation == "attention" for each in routes)
    assert served == (model.config.num_hidden_layers * NEW * len(prompts()) if prepared else 0)
    assert all(noted(module) is None for module in attention_layers(model))


def test_the_manager_gives_the_implementation_back_that_it_exchanged():
    """Asked for eager, continuous batching runs one with pages; releases that exchange it themselves put it back."""
    stock = make("llama", attn_implementation="eager")
    model = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    expected = one_by_one(stock, prompts())
    with nullcontext() if gives_back() else paged(model, EAGER):
        assert batch(model, prompts()) == expected
        reason = noted(attention_layers(model)[0])
    assert reason is not None and repr(EAGER) in reason
    assert model.config._attn_implementation == "eager"
    assert one_by_one(model, prompts()) == expected


def test_recorded_steps_are_left_alone_and_replayed_afterwards(recorded_on_cpu):  # noqa: F811
    model = hf_rocm.prepare(make("llama"), force=True, graphs=True)
    expected = one_by_one(model, prompts())
    state = known(model)
    before = (state.recorded, state.replayed, state.calls)
    assert state.recorded > 0
    with paged(model):
        assert batch(model, prompts()) == expected
    assert (state.recorded, state.replayed, state.calls) == before
    assert one_by_one(model, prompts()) == expected
    assert state.replayed > before[1] and state.recorded == before[0]


def test_a_batch_on_a_suspect_stack_gives_the_tokens_of_generate(suspect_gpu, caplog):  # noqa: F811
    expected = one_by_one(make("llama"), prompts())
    model = hf_rocm.prepare(make("llama"), force=True)
    with paged(model):
        assert batch(model, prompts()) == expected
    assert "continuous batching records no graphs" in caplog.text


def test_generate_over_a_paged_implementation_runs_uncaptured_and_says_so(recorded_on_cpu):  # noqa: F811
    """Whoever leaves it on the model gets from `generate` what stock gives: in new releases an error."""
    stock = make("llama")
    model = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    outcomes = []
    for each in (stock, model):
        each.set_attn_implementation(EAGER)
        try:
            outcomes.append(one_by_one(each, prompts()))
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], str) == gives_back()
    assert known(model).recorded == 0
    assert (
        f"the attention implementation {EAGER!r} does not accept sequence lengths" in hf_rocm.explain(model).details()
    )


def test_on_a_cpu_older_releases_stop_for_want_of_a_figure_for_its_memory(real_memory):
    """The one thing that this suite lends them; with a model of ours they stop as they do with stock."""
    works = memory_is_known()
    for model in (make("llama"), hf_rocm.prepare(make("llama"), force=True)):
        with paged(model), nullcontext() if works else pytest.raises(AssertionError, match="0 of 5 requests"):
            batch(model, prompts())


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["uncaptured", "graphs"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_on_a_gpu_a_prepared_model_gives_stocks_tokens(kind, graphs):
    """graphs: transformers' own, around layers of ours; the releases that have none run uncaptured."""
    stock = make(kind, **KINDS[kind]).to("cuda")
    ours = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    with paged(stock):
        expected = batch(stock, prompts())
    with paged(ours), counted() as hits:
        assert batch(ours, prompts(), graphs=graphs) == expected
    assert sum(count for name, count in hits.items() if name.endswith("DecoderLayer"))
    assert one_by_one(ours, prompts()) == one_by_one(stock, prompts())
