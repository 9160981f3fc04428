"""generate_batch: a model whose layers run in hf_rocm around stock's paged attention returns stock's tokens."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import hf_rocm
from hf_rocm import ops
from hf_rocm.generation import continuous_batching
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
    memory_is_known,
    needs_batching,
    one_by_one,
    paged,
    prompts,
    restores_implementation,
)

pytestmark = needs_batching

# with tied weights, gemma3 repeats the prompt's last token whatever its attention returns
KINDS = {"llama": {}, "qwen3": {}, "gemma3": {"tie_word_embeddings": False}, "mixtral": {}}
ATTENTION = {"attend_into_cache", "attention", "decode_attention", "varlen_attention"}


@pytest.fixture
def bind_overlays(monkeypatch):
    """Returns a function that binds a model's overlays for all instances until the test ends."""
    monkeypatch.setenv("HF_ROCM_FORCE", "1")

    def bound(kind):
        hf_rocm.activate(kind)

    yield bound
    hf_rocm.deactivate()


def attention_layers(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_model_returns_stocks_tokens_around_stocks_attention(kind):
    stock = make(kind, **KINDS[kind])
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    with paged(stock):
        expected = batch(stock, prompts())
    # Repeated tokens would prove little.
    assert all(len(set(tokens)) > NEW / 3 for tokens in expected)

    with paged(prepared), ops.recording() as routes, counted() as hits:
        actual = batch(prepared, prompts())
        reasons = {noted(module) for module in attention_layers(prepared)}
        details = hf_rocm.explain(prepared).details()
    assert actual == expected

    layers = prepared.config.num_hidden_layers
    ran = Counter(route.operation for route in routes)
    assert not ATTENTION & ran.keys()
    assert all(bind.mode_of(module) == bind.ON for module in attention_layers(prepared))
    decoders = sum(count for name, count in hits.items() if name.endswith("DecoderLayer"))
    assert decoders >= layers * NEW and ran["rms_norm"] + ran["add_rms_norm"] >= 2 * decoders
    assert ran["experts" if kind == "mixtral" else "act_and_mul"] == decoders
    # All attention layers stayed stock, for the same reason.
    (reason,) = reasons
    assert reason is not None and ("sdpa_paged" in reason or "paged|" in reason or "cache" in reason)
    assert f"stock at the last call × {layers}: {reason}" in details


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_norms_are_computed_before_stocks_attention_instead_of_fused(kind, monkeypatch):
    """With few rows on a GPU, a layer fuses the norm of its input into hf_rocm's GEMMs.

    Stock's attention runs its own GEMMs, so the norm is computed before them.
    """
    model = make(kind)
    expected = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    monkeypatch.setattr(decoder, "can_fuse", lambda x: True)
    with paged(model), ops.recording() as routes:
        assert batch(model, prompts()) == expected
    # The MLP still fuses its norm.
    assert any(route.operation == "fused_linear" for route in routes)
    assert not any(route.operation in ATTENTION for route in routes)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_overlays_alone_return_stocks_tokens(kind, bind_overlays):
    model = make(kind)
    with paged(model):
        expected = batch(model, prompts())
        bind_overlays(kind)
        with ops.recording() as routes, counted() as hits:
            assert batch(model, prompts()) == expected
    ran = Counter(route.operation for route in routes)
    decoders = sum(count for name, count in hits.items() if name.endswith("DecoderLayer"))
    assert decoders >= model.config.num_hidden_layers * NEW
    assert ran["rms_norm"] and ran["add_rms_norm"] == decoders and not ATTENTION & ran.keys()


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "stock"])
def test_batches_equal_single_prompts_and_generate_works_afterwards(prepared):
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
    served = sum(route.operation == "attention" for route in routes)
    assert served == (model.config.num_hidden_layers * NEW * len(prompts()) if prepared else 0)
    assert all(noted(module) is None for module in attention_layers(model))


def test_the_first_step_waits_for_the_default_stream(monkeypatch):
    """transformers runs steps on separate streams, which would otherwise not wait until the cache is allocated."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager as manager

    if not hasattr(manager, "_create_batch_processor"):
        pytest.skip("not run: the steps of this release run on the default stream")
    events = []
    monkeypatch.setattr(continuous_batching, "_wait", lambda device: events.append(device.type))
    create = manager._create_batch_processor
    monkeypatch.setattr(manager, "_create_batch_processor", lambda self: (events.append("cache"), create(self))[1])
    model = hf_rocm.prepare(make("llama"), force=True)
    model.forward = lambda *args, **kwargs: (events.append("step"), type(model).forward(model, *args, **kwargs))[1]
    batch(model, prompts()[:2])
    assert events[0] == "cache" and events[events.index("step") - 1] == "cpu"


def test_the_manager_restores_the_implementation_that_it_replaced():
    """Continuous batching runs a paged implementation of eager attention. Only some releases select it themselves."""
    stock = make("llama", attn_implementation="eager")
    model = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    expected = one_by_one(stock, prompts())
    with nullcontext() if restores_implementation() else paged(model, EAGER):
        assert batch(model, prompts()) == expected
        reason = noted(attention_layers(model)[0])
    assert reason is not None and repr(EAGER) in reason
    assert model.config._attn_implementation == "eager"
    assert one_by_one(model, prompts()) == expected


def test_recorded_steps_are_unchanged_and_replayed_afterwards(recorded_on_cpu):  # noqa: F811
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


def test_a_batch_with_a_known_fault_of_graphs_returns_the_tokens_of_generate(suspect_gpu, caplog):  # noqa: F811
    expected = one_by_one(make("llama"), prompts())
    model = hf_rocm.prepare(make("llama"), force=True)
    with paged(model):
        assert batch(model, prompts()) == expected
    assert "continuous batching records no graphs" in caplog.text


def test_generate_over_a_paged_implementation_runs_uncaptured_with_the_reason(recorded_on_cpu):  # noqa: F811
    """With a paged implementation, `generate` behaves as in stock transformers: newer releases raise an error."""
    stock = make("llama")
    model = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    outcomes = []
    for variant in (stock, model):
        variant.set_attn_implementation(EAGER)
        try:
            outcomes.append(one_by_one(variant, prompts()))
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], str) == restores_implementation()
    assert known(model).recorded == 0
    assert (
        f"the attention implementation {EAGER!r} does not accept sequence lengths" in hf_rocm.explain(model).details()
    )


def test_on_a_cpu_older_releases_fail_without_a_memory_size(real_memory):
    """The other tests simulate a memory size. Without one, a prepared model fails as in stock transformers."""
    works = memory_is_known()
    for model in (make("llama"), hf_rocm.prepare(make("llama"), force=True)):
        with paged(model), nullcontext() if works else pytest.raises(AssertionError, match="0 of 5 requests"):
            batch(model, prompts())


@pytest.mark.parametrize("name", ["page_size", "block_size"])
def test_the_size_of_a_page_has_two_names(name):
    utils = pytest.importorskip("transformers.generation.continuous_batching.utils")
    if not hasattr(utils, "WorkloadHints"):
        pytest.skip("not run: this release has no hints on lengths")
    config = SimpleNamespace(**{name: 16}, fallback_max_blocks_per_request=32)
    model = make("llama", max_position_embeddings=1024)
    call = SimpleNamespace(arguments={})
    continuous_batching._expect_long_requests(model, call, config)
    assert call.arguments[continuous_batching._HINTS].max_prompt_length == 1024


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["uncaptured", "graphs"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_on_a_gpu_a_prepared_model_returns_stocks_tokens(kind, graphs):
    """graphs: whether transformers records graphs around hf_rocm's layers. Releases without graphs run uncaptured."""
    stock = make(kind, **KINDS[kind]).to("cuda")
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    with paged(stock):
        expected = batch(stock, prompts())
    with paged(prepared), counted() as hits:
        assert batch(prepared, prompts(), graphs=graphs) == expected
    assert sum(count for name, count in hits.items() if name.endswith("DecoderLayer"))
    assert one_by_one(prepared, prompts()) == one_by_one(stock, prompts())
