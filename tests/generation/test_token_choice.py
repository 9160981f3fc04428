"""Recorded token choices: tokens and random states equal stock's, and in some calls transformers chooses the tokens."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
)

import hf_rocm
from hf_rocm.generation import recorder, token_choice
from hf_rocm.generation.recorded_step import largest
from hf_rocm.generation.state import known
from tests.generation import faults
from tests.generation.conftest import SAMPLED, Streamer, counted, generate, prompt, same


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_draws_are_replayed(kind, pair, chosen):
    prepared, stock = pair(kind)
    for seed, padded in ((0, 0), (1, 3), (2, 0)):
        assert same(prepared, stock, prompt(padded=padded), seed=seed, new=25, **SAMPLED)
    # of the first call's 24 steps, 3 run uncaptured; the first replays of steps and draws are compared
    assert chosen["drawn"] > 30 and not chosen["largest"]
    assert known(prepared).disabled is None


SETTINGS = [
    {"temperature": 0.6},
    {"top_k": 0},
    {"top_k": 0, "top_p": 0.8},
    {"min_p": 0.1, "top_k": 0},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.01},
    {"top_k": 5, "renormalize_logits": True},
    {"remove_invalid_values": True},
    {"top_k": 1},
]


def test_all_settings_share_the_recorded_step(pair, chosen):
    prepared, stock = pair()
    for seed, settings in enumerate(SETTINGS + SETTINGS):
        before = chosen["drawn"]
        assert same(prepared, stock, seed=seed, do_sample=True, new=25, **settings)
        assert chosen["drawn"] > before + 5, settings
    assert counted(prepared)[0] == 1


def test_the_largest_logits_are_chosen_in_the_step(pair, chosen):
    prepared, stock = pair()
    for rows in (1, 2, 2):
        assert same(prepared, stock, prompt(rows=rows), new=25)
    assert chosen["largest"] > 40 and not chosen["drawn"]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_choose_the_same_tokens(dtype, sampling, pair, chosen, monkeypatch):
    """The reference is the same model, with tokens chosen by transformers. Of tied logits, the first is chosen."""
    prepared = pair()[0].to(dtype)
    tokens = [generate(prepared, prompt(rows=3), seed=seed, new=25, **sampling) for seed in (0, 1)]
    assert chosen.total() > 25
    monkeypatch.setattr(token_choice, "of_call", lambda *_: None)
    for seed in (0, 1):
        assert torch.equal(generate(prepared, prompt(rows=3), seed=seed, new=25, **sampling), tokens[seed])


def test_rows_end_as_in_stock(pair, chosen):
    prepared, stock = pair()
    free = generate(stock, prompt(rows=3), seed=5, new=20, **SAMPLED)
    ends = {"eos_token_id": [free[0, 15].item(), free[2, 18].item()], "pad_token_id": 0}
    for _ in range(2):
        assert same(prepared, stock, prompt(rows=3), seed=5, new=20, **ends, **SAMPLED)
        assert same(prepared, stock, prompt(rows=3), new=20, **ends)
    assert same(prepared, stock, seed=2, num_return_sequences=3, new=20, **SAMPLED)
    assert chosen["drawn"] and chosen["largest"]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_streamers_receive_the_values_of_stock(sampling, pair, chosen):
    prepared, stock = pair()
    for seed in (0, 1):
        streamers = Streamer(), Streamer()
        for model, streamer in zip((prepared, stock), streamers, strict=True):
            generate(model, prompt(rows=1), streamer=streamer, seed=seed, new=20, **sampling)
        assert streamers[0].values == streamers[1].values
    assert chosen.total() > 10


def test_a_deferred_check_restores_the_random_state(pair, ends_checked_late, chosen):
    prepared, stock = pair()
    free = generate(stock, prompt(rows=1), seed=0, new=25, **SAMPLED)[0]
    # The row ends in one of the first steps, which run uncaptured, in a later step, or in the last one.
    for at in (8, 9, 12, 20, 31):
        settings = {"eos_token_id": free[at].item(), "pad_token_id": 0, **SAMPLED}
        for _ in range(2):
            assert same(prepared, stock, prompt(rows=1), new=25, **settings)
    assert chosen["drawn"]


def test_a_streamer_draws_the_same_random_numbers_as_in_stock(pair, ends_checked_late):
    class Drawing(Streamer):
        def put(self, value):
            super().put((value, torch.rand(1))[0])
            self.values.append(torch.rand(1).item())

    prepared, stock = pair()
    free = generate(stock, prompt(rows=1), seed=0, **SAMPLED)[0]
    streamers = Drawing(), Drawing()
    for model, streamer in zip((prepared, stock), streamers, strict=True):
        generate(model, prompt(rows=1), streamer=streamer, seed=0, eos_token_id=free[12].item(), **SAMPLED)
    assert streamers[0].values == streamers[1].values


class Custom(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert type(scores) is torch.Tensor and scores.dtype == torch.float32
        self.seen.append(scores.sum().item())
        return scores.roll(1, -1)


class CustomTemperature(TemperatureLogitsWarper):
    pass


REFUSED = {
    "custom processor": lambda: {"logits_processor": LogitsProcessorList([Custom()])},
    "custom processor, greedy": lambda: {"logits_processor": LogitsProcessorList([Custom()]), "do_sample": False},
    "subclass": lambda: {"logits_processor": LogitsProcessorList([CustomTemperature(0.5)])},
    "processor that reads tokens": lambda: {"repetition_penalty": 1.2},
    "greedy processor that reads tokens": lambda: {"repetition_penalty": 1.2, "do_sample": False},
    "scores": lambda: {"return_dict_in_generate": True, "output_scores": True},
    "logits": lambda: {"return_dict_in_generate": True, "output_logits": True, "do_sample": False},
}


@pytest.mark.parametrize("name", REFUSED)
def test_in_unsupported_calls_transformers_chooses_the_tokens(name, pair, chosen):
    prepared, stock = pair()
    for _ in range(2):
        results = []
        for model in (prepared, stock):
            arguments = REFUSED[name]()
            results.append(generate(model, seed=0, new=20, **{**SAMPLED, "do_sample": True, **arguments}))
            results.append(arguments)
        actual, arguments, expected, stock_arguments = results
        if isinstance(actual, torch.Tensor):
            assert torch.equal(actual, expected)
        else:
            assert torch.equal(actual.sequences, expected.sequences)
            for result, reference in zip(
                actual.scores or actual.logits, expected.scores or expected.logits, strict=True
            ):
                torch.testing.assert_close(result, reference, rtol=1e-3, atol=1e-3)
        for result, reference in zip(
            arguments.get("logits_processor", ()), stock_arguments.get("logits_processor", ()), strict=True
        ):
            assert getattr(result, "seen", []) == pytest.approx(getattr(reference, "seen", []), rel=1e-3)
    assert counted(prepared)[1] and not chosen


def test_a_returned_dict_without_scores_equals_stock(pair, chosen):
    prepared, stock = pair()
    for _ in range(2):
        actual, expected = (
            generate(model, seed=1, return_dict_in_generate=True, **SAMPLED) for model in (prepared, stock)
        )
        assert torch.equal(actual.sequences, expected.sequences) and actual.scores is expected.scores is None
    assert chosen["drawn"]


@pytest.mark.parametrize("at", [2, 4, 6, 9])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_become_nan_are_handled_as_in_stock(sampling, at, pair):
    """Stock chooses the first NaN, or raises in `torch.multinomial`. Later calls are recorded as before."""
    prepared, stock = pair()
    inputs, weights = prompt(rows=1), stock.model.embed_tokens.weight.clone()
    token = generate(stock, inputs, seed=0, new=20, **sampling)[0, 6 + at]
    for model in (prepared, stock):
        for seed in range(2):
            generate(model, inputs, seed=seed, new=20, **sampling)
        with torch.no_grad():
            model.model.embed_tokens.weight[token] = float("nan")
    results = []
    for model in (prepared, stock):
        streamer = Streamer()
        with pytest.raises(RuntimeError, match="nan") if sampling else nullcontext():
            generate(model, inputs, seed=0, new=30, streamer=streamer, **sampling)
        results.append(streamer.values)
    assert results[0] == results[1] and len(results[0]) == (at + 1 if sampling else 32)
    for model in (prepared, stock):
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(weights)
    for _ in range(2):
        assert same(prepared, stock, inputs, new=20, **sampling)
    assert known(prepared).disabled is None


def test_a_method_of_the_model_may_read_the_logits(pair, chosen):
    prepared, stock = pair()
    sums = []
    for model in (prepared, stock):
        update, values = model._update_model_kwargs_for_generation, []

        def reading(outputs, *args, update=update, values=values, **kwargs):
            values.append(outputs.logits[:, -1].sum().item())
            return update(outputs, *args, **kwargs)

        model._update_model_kwargs_for_generation = reading
        generate(model, seed=0, new=20, **SAMPLED)
        sums.append(values)
    assert sums[0] == pytest.approx(sums[1], rel=1e-4) and not chosen


def test_after_restore_transformers_chooses_the_tokens(pair, chosen):
    prepared, stock = pair()
    generate(prepared, seed=0, **SAMPLED)
    hf_rocm.restore(prepared)
    chosen.clear()
    assert same(prepared, stock, new=20, **SAMPLED) and not chosen


def test_with_beams_or_drafts_transformers_chooses_the_tokens(pair, chosen):
    prepared, stock = pair()
    for settings in (
        {"num_beams": 3},
        {"num_beams": 3, **SAMPLED},
        {"prompt_lookup_num_tokens": 2, "eos_token_id": 60},
    ):
        assert same(prepared, stock, prompt(rows=1), new=20, **settings)
    assert not chosen


def test_the_cache_is_freed_with_the_call(pair):
    """Stand-ins must not reference the runner: a cycle would keep the buffers alive until a garbage collection."""
    prepared, _ = pair()
    generate(prepared, seed=0, new=20, **SAMPLED)
    generate(prepared, new=20)
    cache = weakref.ref(known(prepared).pool._idle[0].cache)
    gc.collect()
    gc.disable()
    try:
        generate(prepared, seed=0, new=20, **SAMPLED)
        known(prepared).pool.clear()
        assert cache() is None
    finally:
        gc.enable()


def test_any_other_use_of_a_stand_in_computes_the_tensor():
    logits = torch.randn((2, 61), generator=torch.Generator().manual_seed(0))
    step = SimpleNamespace(logits=logits[:, None], last_logits=logits, last_tokens=logits.argmax(-1))
    choice = token_choice.Choice([TemperatureLogitsWarper(0.5)], sampled=True)
    stand_in = choice.stand_in(step, lambda: None)
    assert torch.equal(stand_in[:, 0, 3:5], logits[:, 3:5]) and stand_in.shape == (2, 1, 61)
    scores = stand_in[:, -1, :].to(copy=True, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(torch.cat([scores, scores]), torch.cat([logits, logits]))
    processed = choice.replacement()(torch.zeros((2, 1)), scores)
    assert torch.equal(torch.topk(processed, 3).values, torch.topk(logits / 0.5, 3).values)
    assert torch.equal(torch.argmax(processed, dim=-1), logits.argmax(-1))
    assert torch.equal(torch.nn.functional.softmax(processed, dim=0), torch.softmax(logits / 0.5, dim=0))
    probabilities = torch.nn.functional.softmax(processed, dim=-1)
    assert torch.equal(probabilities.cumsum(-1), torch.softmax(logits / 0.5, dim=-1).cumsum(-1))
    torch.manual_seed(0)
    drawn = torch.multinomial(probabilities, num_samples=1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.multinomial(torch.softmax(logits / 0.5, dim=-1), num_samples=1))


@pytest.mark.parametrize("vocabulary", [61, 64, 1000, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_in_two_stages_equals_argmax_in_one(dtype, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    # With 3 values, many of the largest logits are equal.
    for values in (3, 1000):
        logits = torch.randint(0, values, (2, 5, vocabulary), generator=generator).to(dtype)
        logits[1, 0, 7::11] = float("nan")
        logits[1, 1] = -float("inf")
        assert torch.equal(largest({"logits": logits}), logits.argmax(-1))


@pytest.mark.parametrize("first", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "fault", [faults.stale_logits, faults.filter_dropped, faults.garbage_draws], ids=lambda fault: fault.__name__
)
def test_a_wrong_draw_is_detected_and_withdrawn(fault, first, pair, monkeypatch, tmp_path):
    # An assertion could raise for a wrong draw that is not compared; ROCm's kernels have no assertions.
    if first > 2:
        asserts = torch._assert_async
        monkeypatch.setattr(torch, "_assert_async", lambda valid, text: asserts(torch.ones_like(valid), text))
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(fault, first=first, draws=True))
    prepared, stock = pair(graphs=None)
    assert same(prepared, stock, new=40, **SAMPLED)
    assert known(prepared).disabled == "a replayed draw was wrong"
    assert same(prepared, stock, new=40, **SAMPLED)


def test_a_wrong_largest_logit_is_detected(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(faults.argmax_dropped, first=6, last=6))
    prepared, stock = pair(graphs=None)
    assert same(prepared, stock, new=40)
    assert "differed from the step itself" in known(prepared).disabled


def test_a_draw_that_cannot_be_recorded_is_drawn_uncaptured(pair, chosen, monkeypatch):
    def raises(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("hf_rocm.generation.recorded_draw._drawn", raises)
    monkeypatch.setattr(token_choice, "draws_like_multinomial", lambda device: True)
    prepared, stock = pair()
    for seed in (0, 1):
        assert same(prepared, stock, seed=seed, new=20, **SAMPLED)
    assert not chosen["drawn"] and counted(prepared)[1] > 20


def test_another_multinomial_is_not_recorded(pair, chosen, monkeypatch):
    monkeypatch.setattr(token_choice, "draws_like_multinomial", lambda device: False)
    prepared, stock = pair()
    for _ in range(2):
        assert same(prepared, stock, new=20, **SAMPLED)
    assert not chosen["drawn"]
