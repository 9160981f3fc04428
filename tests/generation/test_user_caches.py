"""Dynamic and static caches that a call names, passes or returns: steps are recorded, and contents equal stock's."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache

from hf_rocm.generation import recorder
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.state import known
from tests.generation import faults
from tests.generation.conftest import counted, generate, prompt

RELEASE = Version(transformers.__version__)
# Earlier releases have another class of static cache for sliding windows.
SLIDING_STATIC = Version("4.54") <= RELEASE
NEW = 14
KINDS = ["llama", "mistral", "gemma2"]


def contents(cache):
    """(type, length, keys and values of every layer) of a cache of any release."""
    layers = getattr(cache, "layers", None)
    pairs = zip(cache.key_cache, cache.value_cache, strict=True) if layers is None else _pairs(layers)
    return type(cache), int(cache.get_seq_length()), [tensor for pair in pairs for tensor in pair]


def close(one, two):
    """Compare up to rounding, because layers sum in different orders. The tolerance is 512 eps times the largest value.

    The random weights of the tested models amplify rounding errors. The largest observed error is 45 eps, in T5,
    which doesn't scale its attention scores.
    """
    assert one.isfinite().all() and two.isfinite().all()
    assert (one - two).abs().max() <= 512 * torch.finfo(two.dtype).eps * two.abs().max()


def _pairs(layers):
    return [(layer.keys, layer.values) for layer in layers]


def assert_caches_close(prepared, stock):
    """Compare caches up to rounding, because keys are computed with masks that differ from stock's."""
    (kind, length, tensors), (other, others_length, others) = contents(prepared), contents(stock)
    assert kind is other and length == others_length and len(tensors) == len(others)
    for one, two in zip(tensors, others, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        close(one, two)
    if hasattr(stock, "layers"):
        assert [layer.get_seq_length() for layer in prepared.layers] == [
            layer.get_seq_length() for layer in stock.layers
        ]


@pytest.mark.parametrize("name", [None, "dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [0, 3])
def test_returned_caches_equal_stock(kind, name, padded, pair):
    if name == "static" and kind != "llama" and not SLIDING_STATIC:
        pytest.skip("the static cache of this release has another class")
    prepared, stock = pair(kind)
    settings = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "cache_implementation": name,
    }
    for seed in (0, 1):
        inputs = prompt(padded=padded, seed=seed)
        actual, expected = generate(prepared, inputs, new=NEW, **settings), generate(stock, inputs, new=NEW, **settings)
        assert type(actual) is type(expected) and list(actual) == list(expected)
        assert torch.equal(actual.sequences, expected.sequences)
        for part in ("scores", "logits"):
            close(torch.stack(actual[part]), torch.stack(expected[part]))
        assert_caches_close(actual.past_key_values, expected.past_key_values)
    assert counted(prepared) == (1, 2 * (NEW - 1) - 3)


def passed_cache(kind, form, model):
    if form == "dynamic":
        return DynamicCache()
    if form == "dynamic with a config":
        return DynamicCache(config=model.config)
    if SLIDING_STATIC:
        return StaticCache(config=model.config, max_cache_len=64)
    return StaticCache(config=model.config, max_batch_size=2, max_cache_len=64)


@pytest.mark.parametrize("form", ["dynamic", "dynamic with a config", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_continues_with_a_passed_cache(kind, form, pair):
    if not SLIDING_STATIC and (form == "dynamic with a config" or (form == "static" and kind != "llama")):
        pytest.skip("this release has no such cache")
    prepared, stock = pair(kind)
    caches = [passed_cache(kind, form, model) for model in (prepared, stock)]
    sequences = [prompt(padded=2)["input_ids"]] * 2
    mask = prompt(padded=2)["attention_mask"]
    # Number of new prompt tokens: none, a user's turn, a single token.
    for more in (0, 5, 1):
        further = torch.randint(3, 61, (2, more), generator=torch.Generator().manual_seed(more))
        sequences = [torch.cat((tokens, further), 1) for tokens in sequences]
        mask = torch.cat((mask, mask.new_ones((2, sequences[0].shape[1] - mask.shape[1]))), 1)
        inputs = [{"input_ids": tokens, "attention_mask": mask} for tokens in sequences]
        sequences = [
            generate(model, call, new=NEW, past_key_values=cache)
            for model, call, cache in zip((prepared, stock), inputs, caches, strict=True)
        ]
        assert torch.equal(*sequences)
        assert_caches_close(*caches)
    assert counted(prepared)[1] >= NEW


def test_a_returned_cache_is_continued_and_can_be_copied(pair):
    prepared, stock = pair()
    results = []
    for model in (prepared, stock):
        first = generate(model, new=NEW, return_dict_in_generate=True)
        duplicate = copy.deepcopy(first.past_key_values)
        tokens = [
            generate(model, {"input_ids": first.sequences}, new=NEW, past_key_values=cache)
            for cache in (first.past_key_values, duplicate)
        ]
        results.append((*tokens, first.past_key_values, duplicate))
    assert all(torch.equal(*pair) for pair in zip(results[0][:2], results[1][:2], strict=True))
    assert_caches_close(results[0][2], results[1][2])
    assert_caches_close(results[0][3], results[1][3])
    assert counted(prepared)[1] > 2 * NEW
    assert all(idle.cache.user is None for idle in known(prepared).pool._idle)


@pytest.mark.parametrize("settings", [{}, {"return_dict_in_generate": True, "output_scores": True}])
def test_the_deferred_check_leaves_no_extra_token_in_the_cache(settings, pair, ends_checked_late):
    prepared, stock = pair()
    free = generate(stock, repetition_penalty=9.0)
    settings = {
        **settings,
        "eos_token_id": [row[12].item() for row in free],
        "repetition_penalty": 9.0,
        "pad_token_id": 0,
    }
    for _ in range(2):
        caches = [DynamicCache(), DynamicCache()]
        actual, expected = (
            generate(model, past_key_values=cache, **settings)
            for model, cache in zip((prepared, stock), caches, strict=True)
        )
        if "output_scores" in settings:
            assert len(actual.scores) == len(expected.scores)
            actual, expected = actual.sequences, expected.sequences
        assert torch.equal(actual, expected) and actual.shape[1] < 19
        assert_caches_close(*caches)
    assert counted(prepared)[1]


def test_an_error_leaves_the_tokens_so_far_in_the_cache(pair):
    class Streamer(transformers.TextStreamer):
        calls = 0

        def __init__(self):
            pass

        def put(self, value):
            self.calls += 1
            if self.calls > 9:
                raise KeyboardInterrupt

    # A user's own class would be refused.
    Streamer.__module__ = "transformers"
    prepared, stock = pair()
    caches = [DynamicCache(), DynamicCache()]
    for model, cache in zip((prepared, stock), caches, strict=True):
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompt(rows=1), new=NEW, past_key_values=cache, streamer=Streamer())
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    assert_caches_close(*caches)


def test_a_wrong_replay_does_not_change_the_users_cache(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(faults.garbage, first=6))
    prepared, stock = pair(graphs=None)
    first = generate(stock, new=NEW, return_dict_in_generate=True)
    caches = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    call = {"input_ids": first.sequences}
    tokens = [
        generate(model, call, new=25, past_key_values=cache)
        for model, cache in zip((prepared, stock), caches, strict=True)
    ]
    assert torch.equal(*tokens)
    assert "differed from the step itself" in known(prepared).disabled
    assert_caches_close(*caches)


def test_user_code_can_read_the_passed_cache(pair):
    prepared, stock = pair(graphs=None)

    class Reading(LogitsProcessor):
        def __init__(self, cache):
            self.cache, self.lengths = cache, []

        def __call__(self, input_ids, scores):
            self.lengths.append(int(self.cache.get_seq_length()))
            return scores

    lengths = []
    for model in (prepared, stock):
        reading = Reading(DynamicCache())
        generate(model, past_key_values=reading.cache, logits_processor=LogitsProcessorList([reading]))
        lengths.append(reading.lengths)
    assert lengths[0] == lengths[1] == list(range(7, 19))
    assert any("Reading may read" in reason for reason in known(prepared).turned_away)


class OwnCache(DynamicCache):
    pass


@pytest.mark.parametrize("name", ["offloaded", OwnCache])
def test_other_caches_are_not_replaced(name, pair):
    prepared, stock = pair(graphs=None)
    settings = {"cache_implementation": name} if isinstance(name, str) else {}
    if name == "offloaded" and not torch.cuda.is_available():
        pytest.skip("an offloaded cache needs a GPU")
    results = []
    for model in (prepared, stock):
        arguments = settings or {"past_key_values": name()}
        results.append(generate(model, return_dict_in_generate=True, **arguments))
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert_caches_close(results[0].past_key_values, results[1].past_key_values)
    assert counted(prepared) == (0, 0)


def test_the_cache_of_recorded_steps_is_never_returned(pair):
    prepared, _ = pair()
    for _ in range(2):
        assert not isinstance(generate(prepared, return_dict_in_generate=True).past_key_values, DecodeCache)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_a_prompt_of_embeddings_are_recorded(kind, pair):
    prepared, stock = pair(kind)
    inputs = prompt(padded=2)
    for seed in (0, 1):
        with torch.no_grad():
            embeddings = stock.get_input_embeddings()(prompt(padded=2, seed=seed)["input_ids"])
        call = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}
        assert torch.equal(generate(prepared, call, new=NEW), generate(stock, call, new=NEW))
    assert counted(prepared) == (1, 2 * (NEW - 1) - 3)
