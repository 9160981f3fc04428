"""Encoder calls that differ only in length are padded, share a recording, and return what stock returns."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import features, options
from hf_rocm.forwards import padding, runner
from hf_rocm.forwards.state import known
from hf_rocm.generation import recorder
from tests.forwards.conftest import call, close, counted, equal, reasons, recorder_with
from tests.forwards.families import inputs, make
from tests.generation import faults

TASKS = [
    ("camembert", "CamembertForTokenClassification", {}),
    ("electra", "ElectraForSequenceClassification", {"embedding_size": 16}),
    ("bert", "BertForMaskedLM", {}),
    ("distilbert", "DistilBertForQuestionAnswering", {}),
    ("modernbert", "ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
]


def padded(model):
    """Length → number of calls that were padded to it."""
    return dict(known(model).padded)


def lengths(count=24, smallest=1, largest=62):
    rng = random.Random(count)
    return [rng.randrange(smallest, largest) for _ in range(count)]


def test_lengths_are_rounded_up_to_buckets():
    assert [padding.bucket_of(length) for length in (1, 32, 33, 250, 256, 257, 500)] == [32, 32, 64, 256, 256, 320, 512]


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "classifier", "reranker", "mpnet"])
def test_mixed_lengths_share_a_recording(name, pair):
    prepared, stock = pair(name)
    for seed, length in enumerate(lengths()):
        hidden = (0, None, min(2, length - 1))[seed % 3]
        arguments = inputs(name, length=length, seed=seed, padded=hidden)
        assert close(call(prepared, arguments), call(stock, arguments)), f"call {seed}"
    recorded, replayed = counted(prepared)
    assert recorded == 2 and replayed > 12 and not reasons(prepared)
    assert padded(prepared).keys() == {32, 64} and sum(padded(prepared).values()) >= replayed


@pytest.mark.parametrize(
    ("family", "task", "changes"), TASKS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_task_pads_its_calls(family, task, changes, pair):
    prepared, stock = pair(family, task=task, **changes)
    for seed, length in enumerate(lengths(12, largest=31)):
        arguments = inputs(family, length=length, seed=seed, padded=min(1, length - 1))
        assert close(call(prepared, arguments), call(stock, arguments)), f"call {seed}"
    assert counted(prepared)[0] == 1 and counted(prepared)[1] > 6


@pytest.mark.parametrize(
    "flags",
    [{"output_hidden_states": True}, {"return_dict": False}, {"output_attentions": True}],
    ids=lambda flags: next(iter(flags)),
)
def test_calls_with_flags_are_padded(flags, pair):
    prepared, stock = pair(attn_implementation="eager")
    for seed, length in enumerate(lengths(12, largest=31)):
        arguments = {**inputs("bert", length=length, seed=seed), **flags}
        assert close(call(prepared, arguments), call(stock, arguments)), f"call {seed}"
    assert counted(prepared)[0] == 1 and counted(prepared)[1] > 6
    if "output_hidden_states" in flags:
        output = call(prepared, {**inputs("bert", length=5), **flags})
        assert output.hidden_states[-1] is output.last_hidden_state


def test_token_types_and_positions_are_padded_too(pair):
    prepared, stock = pair()
    for seed, length in enumerate(lengths(10, largest=31)):
        arguments = inputs("bert", length=length, seed=seed)
        extra = (torch.ones(2, length, dtype=torch.long), torch.arange(length).flip(0)[None])
        args = (arguments["input_ids"], arguments["attention_mask"], *extra)
        assert close(call(prepared, {}, *args), call(stock, {}, *args))
    assert counted(prepared)[0] == 1 and counted(prepared)[1] > 4


def test_outputs_belong_to_the_caller_and_have_stocks_strides(pair):
    prepared, stock = pair()
    kept = []
    for seed, length in enumerate(lengths(16, largest=31)):
        arguments = inputs("bert", length=length, seed=seed)
        output, expected = call(prepared, arguments).last_hidden_state, call(stock, arguments).last_hidden_state
        assert output.stride() == expected.stride() and output.untyped_storage().nbytes() == output.nbytes
        kept.append((output, output.clone()))
    assert all(torch.equal(*both) for both in kept) and counted(prepared)[1] > 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_padded(dtype, pair):
    prepared, stock = pair()
    prepared.to(dtype)
    stock.to(dtype)
    for seed, length in enumerate(lengths(12, largest=31)):
        arguments = inputs("bert", length=length, seed=seed, padded=0)
        output, expected = call(prepared, arguments).last_hidden_state, call(stock, arguments).last_hidden_state
        assert output.dtype is dtype
        assert (output.float() - expected.float()).square().mean().sqrt() < 4 * torch.finfo(dtype).eps
    assert counted(prepared)[1] > 6 and known(prepared).unpadded is None


def test_one_length_is_recorded_by_its_shape(pair):
    prepared, stock = pair()
    for seed in range(8):
        arguments = inputs("bert", seed=seed)
        assert equal(call(prepared, arguments), call(stock, arguments))
    # Calls of other lengths are padded; calls of the recorded length are still not padded.
    for seed in range(8):
        arguments = inputs("bert", length=(7, 9)[seed % 2], seed=seed)
        assert close(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared)[0] == 2 and padded(prepared) == {32: 4}


def no_real_token(arguments):
    arguments["attention_mask"][0] = 0


def float_mask(arguments):
    arguments["attention_mask"] = arguments["attention_mask"].float()


def pairwise_mask(arguments):
    rows, length = arguments["input_ids"].shape
    arguments["attention_mask"] = torch.ones(rows, length, length, dtype=torch.long)


def embeddings(arguments):
    arguments["inputs_embeds"] = torch.randn(*arguments.pop("input_ids").shape, 32)


def decoder_arguments(arguments):
    arguments["encoder_hidden_states"] = None
    arguments["use_cache"] = True


@pytest.mark.parametrize("change", [no_real_token, float_mask, pairwise_mask, embeddings, decoder_arguments])
def test_other_calls_are_not_padded(change, pair):
    prepared, stock = pair()
    for seed, length in enumerate((5, 6, 7, 8, 5, 6, 7, 8)):
        arguments = inputs("bert", length=length, seed=seed, padded=1)
        change(arguments)
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert padded(prepared) == {}


def test_a_loss_is_not_padded(pair):
    prepared, stock = pair("classifier")
    for seed, length in enumerate((5, 6, 7, 8)):
        arguments = {**inputs("classifier", length=length, seed=seed), "labels": torch.tensor([1, 0])}
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert padded(prepared) == {}


def test_calls_with_padding_tokens_far_from_real_tokens_are_not_padded(pair):
    """In some releases, padding tokens far from real ones attend to all tokens, so their results depend on the length.

    Calls with such tokens are not padded.
    """
    prepared, stock = pair("modernbert")
    for seed, length in enumerate((12, 13, 14, 15, 12, 13)):
        arguments = inputs("modernbert", length=length, seed=seed, padded=8)
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert padded(prepared) == {}
    for seed, length in enumerate((12, 13, 14, 15, 16, 17, 18)):
        arguments = inputs("modernbert", length=length, seed=seed, padded=4)
        assert close(call(prepared, arguments), call(stock, arguments))
    assert padded(prepared)[32] > 4


@pytest.mark.parametrize(("tokens", "expected"), [(0, {}), (64, {32: 5}), (63, {})])
def test_the_size_of_padded_calls_is_an_option(tokens, expected, pair):
    prepared, stock = pair()
    with options.override(pad_tokens=tokens):
        for length in (5, 6, 7, 8, 9, 10):
            arguments = inputs("bert", length=length)
            assert close(call(prepared, arguments), call(stock, arguments))
    assert padded(prepared) == expected


@pytest.mark.parametrize(("replay", "padded_to"), [(0.5, {32: 12}), (2.0, {32: 4})], ids=["faster", "slower"])
def test_calls_are_not_padded_where_that_takes_longer(replay, padded_to, pair, monkeypatch):
    prepared, stock = pair()
    timed = []

    def time(device, run):
        timed.append(run)
        # The unpadded call is timed first.
        return run(), 1.0 if len(timed) == 1 else replay

    monkeypatch.setattr(runner, "_is_timed", lambda device: True)
    monkeypatch.setattr(runner, "_timed", time)
    for seed, length in enumerate(range(5, 18)):
        arguments = inputs("bert", length=length, seed=seed)
        assert close(call(prepared, arguments), call(stock, arguments)), f"call {seed}"
    assert len(timed) == 3 and padded(prepared) == padded_to
    lines = [line for line in hf_rocm.explain(prepared).forwards if line.startswith("no longer padded")]
    assert len(lines) == (replay > 1) and all("32 tokens: 1 kind of call" in line for line in lines)
    assert not reasons(prepared) and known(prepared).disabled is None
    arguments = inputs("bert", length=20)
    # Where calls are no longer padded, a repeated shape is recorded unpadded.
    for _ in range(4):
        assert close(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared)[0] == (1 if replay < 1 else 2)


def test_lengths_whose_bucket_exceeds_the_models_limit_are_not_padded(pair):
    prepared, _ = pair(max_position_embeddings=40)
    for length in (33, 35, 36, 38):
        call(prepared, inputs("bert", length=length))
    assert padded(prepared) == {}


@pytest.mark.parametrize("changes", [{"is_decoder": True}, {"chunk_size_feed_forward": 1}])
def test_unsupported_models_are_not_padded(changes, pair):
    if "is_decoder" not in changes and not hasattr(transformers.BertConfig(), "chunk_size_feed_forward"):
        pytest.skip("this release has no such setting")
    prepared, _ = pair(**changes)
    assert padding.refuses_model(prepared) is not None
    for length in (5, 6, 7, 8):
        call(prepared, inputs("bert", length=length), **({"use_cache": False} if "is_decoder" in changes else {}))
    assert padded(prepared) == {}


class Subclass(transformers.BertModel):
    pass


def test_subclasses_and_other_classes_are_not_padded(monkeypatch):
    assert padding.refuses_model(make("bert")) is None
    assert "Subclass" in padding.refuses_model(Subclass(make("bert").config))
    assert "CLIPTextModel" in padding.refuses_model(make("clip-text"))
    monkeypatch.setattr(type(make("bert").embeddings), "forward", lambda self, **kwargs: None)
    assert "BertEmbeddings.forward was replaced" in padding.refuses_model(make("bert"))
    assert padding.refuses_model(make("roberta")) is None
    prepared = hf_rocm.prepare(make("bert"), force=True)
    assert any("BertEmbeddings.forward was replaced" in line for line in hf_rocm.explain(prepared).forwards)


def test_every_padded_class_exists():
    for feature, names in features.FEATURES.items():
        if feature.startswith("padding_"):
            module, _, name = names[0].partition(":")
            assert features.padding_of(getattr(transformers, name)) == feature, module


def test_a_forward_that_depends_on_the_length_ends_padding(pair):
    """The first padded forward differs from the unpadded one, so padding ends. The caller gets stock's results."""

    def mean(module, args, output):
        return output + args[0].mean(1)

    mean.__module__ = "transformers"
    prepared, stock = pair()
    for model in (prepared, stock):
        model.pooler.register_forward_hook(mean)
    for seed, length in enumerate((5, 6, 7, 8, 9, 5, 5, 5, 5)):
        arguments = inputs("bert", length=length, seed=seed)
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert padded(prepared) == {32: 1}
    assert known(prepared).unpadded.startswith("a padded forward differed from the unpadded one by")
    assert any(line.startswith("calls are no longer padded") for line in hf_rocm.explain(prepared).forwards)
    # Recordings by exact shapes are still replayed.
    assert counted(prepared)[1] > 0


def test_a_wrong_replay_of_a_padded_call_is_detected(pair, monkeypatch):
    monkeypatch.setitem(recorder.factories, "cpu", recorder_with(faults.garbage, first=1))
    prepared, stock = pair()
    for seed, length in enumerate((5, 6, 7, 8, 9)):
        arguments = inputs("bert", length=length, seed=seed)
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert "a replayed forward differed" in known(prepared).disabled and padded(prepared) == {32: 2}


def test_explain_lists_padded_calls(pair):
    prepared, _ = pair()
    for length in (5, 6, 7, 40, 41, 42):
        call(prepared, inputs("bert", length=length))
    lines = hf_rocm.explain(prepared).forwards
    assert "padded to 32 tokens: 2 calls" in lines and "padded to 64 tokens: 2 calls" in lines


def test_a_changed_model_is_padded_again(pair):
    prepared, stock = pair()
    for epsilon in (1e-12, 1.0):
        for model in (prepared, stock):
            model.embeddings.LayerNorm.eps = epsilon
        for seed, length in enumerate(lengths(10, largest=31)):
            arguments = inputs("bert", length=length, seed=seed)
            assert close(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared)[0] == 2
    twin = copy.deepcopy(prepared)
    for length in (5, 6, 7, 8):
        assert close(call(twin, inputs("bert", length=length)), call(stock, inputs("bert", length=length)))
    assert padded(twin) == {32: 3}
