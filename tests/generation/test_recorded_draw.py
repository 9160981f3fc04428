"""The probabilities of a recorded draw are bitwise equal to transformers', and its tokens to those of `multinomial`."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_rocm.generation import recorded_draw
from hf_rocm.generation.recorded_draw import RecordedDraw, draws_like_multinomial, probabilities_of
from hf_rocm.generation.token_choice import RECORDED
from tests.generation.emulator import EmulatedRecorder

CPU = torch.device("cpu")


def some_processors(rng):
    """Random processors with random settings, in the order in which transformers calls them."""
    keep, filtered = rng.choice([1, 1, 2, 5]), rng.choice([-float("inf"), -float("inf"), -1e9, -4.0])
    further = {"filter_value": filtered, "min_tokens_to_keep": keep}
    processors = [
        InfNanRemoveLogitsProcessor(),
        TemperatureLogitsWarper(rng.choice([0.2, 0.7, 1.3, 3.0])),
        TopKLogitsWarper(rng.choice([1, 2, 20, 50, 10_000]), **further),
        TopPLogitsWarper(rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]), **further),
        MinPLogitsWarper(rng.choice([0.0, 0.05, 0.5, 1.0]), **further),
        TypicalLogitsWarper(rng.choice([0.2, 0.9]), **further),
        EpsilonLogitsWarper(rng.choice([1e-3, 0.2]), **further),
        LogitNormalization(),
    ]
    return [processor for processor in processors if rng.random() < 0.5]


def some_logits(rng, generator):
    """Logits of a random vocabulary size and dtype: ordinary, with ties, with banned tokens, or nearly equal."""
    rows, size = rng.choice([1, 1, 3]), rng.choice([1, 7, 61, 257, 1000, 5003])
    logits = 4 * torch.randn((rows, size), generator=generator)
    form = rng.choice(["ordinary", "ties", "banned", "flat"])
    if form == "ties":
        logits = logits.round()
    elif form == "banned":
        logits[:, ::2] = -float("inf") if size > 1 else 0.0
    elif form == "flat":
        logits = 1e-3 * logits
    return logits.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))


def stock(logits, processors):
    """The probabilities as transformers' sampling loop computes them."""
    scores = LogitsProcessorList(processors)(torch.zeros((len(logits), 1)), logits.to(copy=True, dtype=torch.float32))
    return torch.nn.functional.softmax(scores, dim=-1)


@pytest.mark.parametrize("seed", range(60))
def test_probabilities_and_tokens_equal_stock(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits, processors = some_logits(rng, generator), some_processors(rng)
    step = SimpleNamespace(last_logits=torch.zeros_like(logits))
    recorded = RecordedDraw(EmulatedRecorder(CPU), step, processors)
    for number in range(3):
        step.last_logits.copy_(logits.roll(number, -1))
        expected = stock(step.last_logits, processors)
        torch.manual_seed(seed + number)
        tokens = torch.multinomial(expected, num_samples=1)
        after = torch.get_rng_state()
        torch.manual_seed(seed + number)
        assert torch.equal(recorded.draw(), tokens)
        assert torch.equal(recorded.tensors[1], expected)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(probabilities_of(step.last_logits, processors), expected)
        before = torch.get_rng_state()
        assert recorded.agrees(step, processors)
        # A comparison draws from separate generators.
        assert torch.equal(torch.get_rng_state(), before)


def test_every_recorded_processor_is_tested():
    tested = {type(processor).__name__ for seed in range(60) for processor in some_processors(random.Random(seed))}
    assert tested == set(RECORDED)
    assert all(hasattr(logits_process, name) for name in RECORDED)


def test_a_wrong_draw_is_detected():
    processors = [TemperatureLogitsWarper(0.7)]
    step = SimpleNamespace(last_logits=torch.randn((2, 61), generator=torch.Generator().manual_seed(0)))
    recorded = RecordedDraw(EmulatedRecorder(CPU), step, processors)
    assert recorded.agrees(step, processors)
    assert not recorded.agrees(step, [TemperatureLogitsWarper(0.8)])
    torch.rand(1)
    noise, recorded._noise = recorded._noise, torch.ones_like(recorded._noise)
    # The recording reads the noise of the last comparison.
    assert not recorded.agrees(step, processors)
    recorded._noise = noise
    assert recorded.agrees(step, processors)


def test_sums_in_another_order_are_not_a_fault(monkeypatch):
    """On a GPU, the cumulative sum of a row may be computed in different orders in replays and in uncaptured draws."""
    step = SimpleNamespace(last_logits=torch.zeros((1, 61)))
    recorded = RecordedDraw(EmulatedRecorder(CPU), step, [])
    recorded._varies, runs = True, itertools.count()

    def varying(logits, processors):
        return torch.softmax(logits + 1e-3 * (next(runs) % 3 == 0) * torch.arange(61), dim=-1)

    monkeypatch.setattr(recorded_draw, "probabilities_of", varying)
    assert recorded.agrees(step, []) and next(runs) == 2


def test_stale_logits_are_a_fault_even_if_results_vary():
    """Every replay reads the logits of the previous one, so a second replay of the same logits would be correct."""
    stale, step = torch.zeros((2, 1, 61)), SimpleNamespace(last_logits=torch.zeros((1, 61)))
    recorded = RecordedDraw(EmulatedRecorder(CPU), SimpleNamespace(last_logits=stale[0]), [])
    recorded._varies, replay = True, recorded._recording.replay

    def late():
        stale[0].copy_(stale[1])
        stale[1].copy_(step.last_logits)
        replay()

    recorded._recording.replay = late
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        step.last_logits.normal_(0, 4, generator=generator)
        before = step.last_logits.clone()
        assert not recorded.agrees(step, [])
        assert torch.equal(step.last_logits, before)


def test_nan_agrees_where_the_device_checks_nothing(monkeypatch):
    """By default, ROCm builds of PyTorch have no device-side assertions."""
    asserts = torch._assert_async
    monkeypatch.setattr(torch, "_assert_async", lambda valid, text: asserts(torch.ones_like(valid), text))
    multinomial = torch.multinomial

    def unchecked(probabilities, **keywords):
        try:
            return multinomial(probabilities, **keywords)
        except RuntimeError:
            noise = torch.empty_like(probabilities).exponential_(1, generator=keywords["generator"])
            return (probabilities / noise).argmax(dim=-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", unchecked)
    step = SimpleNamespace(last_logits=torch.full((2, 61), float("nan")))
    assert RecordedDraw(EmulatedRecorder(CPU), step, []).agrees(step, [])


def test_invalid_probabilities_raise_as_in_stock():
    for logits, text in ((torch.full((1, 9), float("nan")), "inf"), (torch.full((1, 9), -float("inf")), "inf")):
        with pytest.raises(RuntimeError, match=text):
            torch.multinomial(stock(logits, []), num_samples=1)
        with pytest.raises(RuntimeError, match=text):
            recorded_draw._drawn(probabilities_of(logits, []), torch.ones_like(logits), torch.tensor(False))
        step = SimpleNamespace(last_logits=torch.zeros_like(logits))
        recorded = RecordedDraw(EmulatedRecorder(CPU), step, [])
        step.last_logits.copy_(logits)
        for draw in (recorded.draw, lambda step=step, recorded=recorded: recorded.agrees(step, [])):
            with pytest.raises(RuntimeError, match=text):
                draw()
        step.last_logits.zero_()
        assert recorded.agrees(step, []) and recorded.draw().shape == (1, 1)


def test_a_different_multinomial_is_detected(monkeypatch):
    draws_like_multinomial.cache_clear()
    before = torch.get_rng_state()
    assert draws_like_multinomial(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    draws_like_multinomial.cache_clear()
    multinomial = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda weights, **keywords: multinomial(weights.flip(-1), **keywords))
    assert not draws_like_multinomial(CPU)
    draws_like_multinomial.cache_clear()
