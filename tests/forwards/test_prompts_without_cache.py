"""A forward without a cache that returns the logits of the last token is a prompt. It returns what stock returns."""

from __future__ import annotations

import functools

import pytest
import torch
from packaging.version import Version

from hf_rocm.forwards import prompts, runner
from hf_rocm.forwards.state import known
from tests.forwards.conftest import counted, equal, reasons
from tests.forwards.test_prompts import CALLS, STATIC
from tests.generation.conftest import prompt
from tests.releases import RELEASE

pytestmark = pytest.mark.skipif(
    Version("4.56") > RELEASE, reason="forwards of this release create caches of several types"
)


@pytest.mark.parametrize("kind", STATIC)
def test_forwards_without_a_cache_return_one(kind, decoders):
    prepared, twin = decoders(kind)
    for seed in range(CALLS):
        inputs = prompt(length=20, seed=seed)
        with torch.no_grad():
            results = [model(**inputs, logits_to_keep=1) for model in (prepared, twin)]
            assert torch.equal(results[0].logits, results[1].logits)
            caches = [result.past_key_values for result in results]
            assert type(caches[0]) is type(caches[1]) and caches[0].get_seq_length() == 20
            more = torch.full((2, 1), 7)
            steps = [m(input_ids=more, past_key_values=c).logits for m, c in zip((prepared, twin), caches, strict=True)]
            assert torch.equal(*steps)
    assert counted(prepared) == (1, 3)


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions", "output_router_logits"])
def test_everything_that_a_forward_returns_is_its_callers(flag, decoders):
    """Flags of the config add tensors to the output, some of them before the logits. Later calls overwrite none."""
    if RELEASE.major < 5:
        pytest.skip("this release has no such model, or no such cache")
    prepared, twin = decoders("mixtral")
    for model in (prepared, twin):
        model.set_attn_implementation("eager")
        setattr(model.config, flag, True)
    results = []
    for seed in range(CALLS + 2):
        inputs = prompt(length=20, seed=seed)
        with torch.no_grad():
            results.append([model(**inputs, logits_to_keep=1) for model in (prepared, twin)])
    for one, other in results:
        assert equal(one.to_tuple()[:-1], other.to_tuple()[:-1]) and list(one) == list(other)
        for layer, same in zip(one.past_key_values.layers, other.past_key_values.layers, strict=True):
            assert torch.equal(layer.keys, same.keys) and torch.equal(layer.values, same.values)
    assert counted(prepared)[0] == 1 and counted(prepared)[1] >= 4


def test_an_output_without_a_cache_stays_without_one(decoders):
    prepared, twin = decoders()
    for model in (prepared, twin):
        model.config.use_cache = False
    for seed in range(CALLS):
        inputs = prompt(length=20, seed=seed)
        with torch.no_grad():
            one, other = (model(**inputs, logits_to_keep=1) for model in (prepared, twin))
        assert one.past_key_values is None is other.past_key_values and torch.equal(one.logits, other.logits)


def test_indices_of_logits_are_no_count(decoders):
    prepared, twin = decoders()
    inputs = prompt(length=20)
    for indices in ([3, 5], [1]):
        with torch.no_grad():
            one, other = (model(**inputs, logits_to_keep=torch.tensor(indices)) for model in (prepared, twin))
        assert torch.equal(one.logits, other.logits) and one.logits.shape[1] == len(indices)
    assert known(prepared) is None


def test_an_error_of_the_model_reaches_the_caller(decoders):
    prepared, _ = decoders()
    inputs = {"input_ids": torch.full((2, 20), 10**6)}
    for _ in range(3):
        with torch.no_grad(), pytest.raises(IndexError):
            prepared(**inputs, logits_to_keep=1)
    assert known(prepared).disabled is None
    assert any("raised IndexError while it was observed" in reason for reason in reasons(prepared))


def test_a_forward_whose_observation_needs_too_much_memory_is_observed_once(decoders, monkeypatch):
    prepared, twin = decoders()
    observed = []

    def observe(*_):
        observed.append(prepared)
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(runner, "observe", observe)
    for seed in range(5):
        inputs = prompt(length=20, seed=seed)
        with torch.no_grad():
            one, other = (model(**inputs, logits_to_keep=1) for model in (prepared, twin))
        assert torch.equal(one.logits, other.logits)
    assert len(observed) == 1 and known(prepared).disabled is None
    assert any("OutOfMemoryError while it was observed" in reason for reason in reasons(prepared))


def test_a_forward_that_returns_no_cache_runs_uncaptured(decoders, monkeypatch):
    """This is found while the forward is observed, and no error reaches the caller."""
    prepared, twin = decoders()
    monkeypatch.setattr(prompts, "_kept", functools.partial(_kept_without_cache, prompts._kept))
    for seed in range(4):
        inputs = prompt(length=20, seed=seed)
        with torch.no_grad():
            one, other = (model(**inputs, logits_to_keep=1) for model in (prepared, twin))
        assert torch.equal(one.logits, other.logits)
    assert counted(prepared) == (0, 0)
    assert any("or not at all" in reason for reason in reasons(prepared))


def _kept_without_cache(kept, stock, windows, **arguments):
    def run(**further):
        output = stock(**further)
        return type(output)(**{**output, "past_key_values": None})

    return kept(run, windows, **arguments)
