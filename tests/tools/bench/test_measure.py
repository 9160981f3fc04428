"""Rounds are interleaved, times exclude warm-up rounds, a side that can't run is skipped, and sides share weights."""

from __future__ import annotations

import statistics

import pytest
import torch

import hf_rocm
from hf_rocm.errors import OptionError
from hf_rocm.generation import recorder
from hf_rocm.generation.schedule import Schedule
from hf_rocm.tools.bench import generating, inputs, measure, run, variants
from hf_rocm.tools.bench.cases import Case, grid
from hf_rocm.tools.bench.clock import device_time, spread
from hf_rocm.tools.bench.generating import generate_logits
from tests.generation.emulator import EmulatedRecorder
from tests.tools.bench.conftest import CPU, RATES

DECODE = Case("decode", 1, 8, 3)


def measurement(model, names, *, rounds=3, progress=lambda text: None):
    sides, _ = variants.sides(model, names, encoder=False)
    return measure.Measurement(model, sides, None, RATES, rounds, progress)


@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("rounds", [3, 5, 7, 9])
def test_in_most_timed_calls_no_step_is_compared(tokens, rounds):
    schedule, compared = Schedule(), []
    for call in range(measure.WARM_ROUNDS + rounds):
        schedule.enter(call)
        before = schedule.comparisons
        for _ in range(tokens - 1):
            schedule.agreed() if schedule.due else schedule.count()
        compared.append(schedule.comparisons - before)
    assert compared[0] > 4 and statistics.median(compared[measure.WARM_ROUNDS :]) == 0


def test_every_round_runs_every_side_in_turn(model, monkeypatch):
    turns = []
    monkeypatch.setattr(
        measure, "_turn", lambda side, case, samples, *, warm: turns.append((side.name, warm)) or "enough"
    )
    run = measurement(model, ["stock", "hf_rocm"])
    done = measure.measure(run, DECODE)
    assert turns == [("stock", True), ("hf_rocm", True)] and done.left_out == {"stock": "enough", "hf_rocm": "enough"}
    turns.clear()

    def turn(side, case, samples, *, warm):
        turns.append((side.name, warm))
        samples.cold = 1.0
        if not warm:
            samples.unit.append(0.25)
            samples.whole.append(0.5)

    monkeypatch.setattr(measure, "_turn", turn)
    done = measure.measure(run, DECODE)
    order = [name for name, _ in turns]
    warm_turns = [True] * (2 * measure.WARM_ROUNDS)
    assert order == ["stock", "hf_rocm"] * (measure.WARM_ROUNDS + 3)
    assert [warm for _, warm in turns] == warm_turns + [False] * 6
    assert [(timing.unit.median, timing.warmup, len(timing.rounds)) for timing in done.timings] == [(250.0, 0.5, 3)] * 2


def test_a_decode_case_has_a_time_per_token_and_to_the_first_token(model):
    done = measure.measure(measurement(model, ["stock", "hf_rocm"], rounds=2), DECODE)
    for timing in done.timings:
        assert 0 < timing.unit.low <= timing.unit.median <= timing.unit.high and timing.first.median > 0
        assert len(timing.rounds) == 2 and timing.peak is None


def test_timed_calls_have_no_processor_or_streamer(model, monkeypatch):
    """With a processor or a streamer, tokens would be chosen in a different way than in a user's call."""
    generate, calls = type(model).generate, []
    monkeypatch.setattr(
        type(model), "generate", lambda self, **arguments: calls.append(arguments.keys()) or generate(self, **arguments)
    )
    whole, first = {"input_ids", "attention_mask", "max_new_tokens", "do_sample"}, {"stopping_criteria"}
    side = measurement(model, ["stock"]).sides[0]
    times = generating.generate(side, inputs.tokens(model, 2, 8), DECODE)
    assert calls == [whole, whole | first] and 0 < times.later < times.whole


def test_the_first_token_is_timed_in_a_call_that_ends_after_it(model, monkeypatch):
    lengths, call = [], generating.call
    monkeypatch.setattr(
        generating, "call", lambda *arguments, **keywords: lengths.append(call(*arguments, **keywords).shape[1]) or None
    )
    generating.generate(measurement(model, ["stock"]).sides[0], inputs.tokens(model, 2, 8), DECODE)
    assert lengths == [8 + 3, 8 + 1]


def test_a_recorded_step_is_also_timed_alone(model, monkeypatch):
    """Timing a step must not change the logits of the next call."""
    monkeypatch.setitem(recorder.factories, "cpu", EmulatedRecorder)
    run = measurement(model, ["stock", "no-graphs", "hf_rocm"], rounds=1)
    monkeypatch.setattr(variants.Side, "forget", lambda side: None)
    stock, uncaptured, prepared = measure.measure(run, Case("decode", 1, 8, 8)).timings
    assert prepared.replay > 0 and stock.replay is uncaptured.replay is None
    ids = inputs.tokens(model, 1, 8)
    before = generate_logits(run.sides[2], ids, 8, judged=8)[1]
    assert run.sides[2].replay_alone() > 0
    assert torch.equal(generate_logits(run.sides[2], ids, 8, judged=8)[1], before)
    run.sides[2].release()
    assert run.sides[2].replay_alone() is None


def test_a_failing_side_is_skipped_unless_it_is_hf_rocm(model, monkeypatch):
    run = measurement(model, ["stock", "hf_rocm"], rounds=1)
    run.sides[0].arguments["no_such_argument"] = 1
    done = measure.measure(run, DECODE)
    assert "ValueError" in done.left_out["stock"] and [timing.side for timing in done.timings] == ["hf_rocm"]
    run.sides[1].arguments["no_such_argument"] = 1
    with pytest.raises(ValueError):
        measure.measure(run, DECODE)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measure, "generate", full)
    done = measure.measure(run, DECODE)
    assert done.left_out["hf_rocm"] == "it needs more memory than is available"


def test_sides_share_weights_and_only_hf_rocms_is_prepared(model):
    sides, missing = variants.sides(model, ["stock", "compile", "liger", "no-graphs", "hf_rocm"], encoder=False)
    assert list(missing) == ["liger"] and [variant.name for variant in sides] == [
        "stock",
        "compile",
        "no-graphs",
        "hf_rocm",
    ]
    stock, prepared = sides[0].model, sides[3].model
    assert prepared is model and sides[2].model is model and stock is not model and type(stock) is type(model)
    for actual, expected in zip(prepared.parameters(), stock.parameters(), strict=True):
        assert actual.data_ptr() == expected.data_ptr()
    with torch.no_grad(), hf_rocm.ops.recording() as routes:
        sides[0](input_ids=torch.arange(10, 20)[None])
        assert not routes
        sides[3](input_ids=torch.arange(10, 20)[None])
    assert {route.operation for route in routes} >= {"attention", "rms_norm"}
    with pytest.raises(AssertionError, match="before the model is prepared"):
        variants.twin(model)
    assert sides[2].arguments == {"disable_compile": True}
    assert (
        sides[1].arguments["cache_implementation"] == "static"
        and sides[1].arguments["compile_config"].mode == "default"
    )


def test_hf_rocm_is_timed_with_fused_weights(monkeypatch):
    """Models that share hf_rocm's weights must not move them out of the fused blocks."""
    seen = []
    timed = measure.timed

    def recorded(call, device):
        with hf_rocm.ops.recording() as routes:
            seconds = timed(call, device)
        seen.append({route.shapes[1] for route in routes if "linear" in route.operation})
        return seconds

    monkeypatch.setattr(measure, "timed", recorded)
    subject = run.Subject(None, "small", CPU, layers=1)
    run.bench(
        subject, [Case("prefill", 2, 40)], ["stock", "hf_rocm"], rounds=1, segment="x", progress=lambda text: None
    )
    fused = {((4 + 2 + 2) * 64, 256), (2 * 704, 256)}
    assert seen[0] == set() and seen[-1] >= fused


def test_an_unknown_side_and_an_unknown_shape_are_named(model):
    with pytest.raises(OptionError, match="'fast'"):
        variants.sides(model, ["fast"], encoder=False)
    with pytest.raises(OptionError, match="'llama-9b'"):
        run.bench(run.Subject(None, "llama-9b", CPU), [], ["stock"], rounds=1, segment="x", progress=lambda text: None)


def test_the_rate_of_an_encoder_counts_samples():
    subject = run.Subject(None, "bert-base", CPU, layers=1)
    segment = run.bench(
        subject, [Case("encode", 2, 8)], ["stock", "hf_rocm"], rounds=1, segment="x", progress=lambda text: None
    )
    (result,) = segment.results
    assert [timing.side for timing in result.timings] == ["stock", "hf_rocm"] and result.floor.milliseconds > 0
    assert result.case.rate(10.0) == 200.0


def test_the_grid_has_every_combination():
    cases = grid(["decode", "prefill"], [1, 8], [128, 1024], new=64)
    assert len(cases) == 8 and cases[0] == Case("decode", 1, 128, 64) and cases[-1] == Case("prefill", 8, 1024)


def test_a_spread_has_the_median_and_quartiles_and_device_time_has_a_warm_up():
    assert spread([0.004]) == (4.0, 4.0, 4.0)
    assert spread([0.001, 0.002, 0.003, 0.004, 0.005]) == pytest.approx((3.0, 2.0, 4.0))
    called = []
    times = device_time([lambda: called.append(1)] * 4, CPU, repeats=2)
    assert len(times) == 2 and len(called) == 3 + 2 * 4


def test_sides_whose_caches_do_not_fit_together_are_not_interleaved_and_have_a_note(model, monkeypatch):
    monkeypatch.setattr(measure, "_all_fit", lambda *args: False)
    order = []
    turn = measure._turn
    monkeypatch.setattr(
        measure, "_turn", lambda side, *args, **rest: order.append(side.name) or turn(side, *args, **rest)
    )
    done = measure.measure(measurement(model, ["stock", "hf_rocm"], rounds=1), DECODE)
    calls = measure.WARM_ROUNDS + 1
    assert order == ["stock"] * calls + ["hf_rocm"] * calls
    assert all("its rounds were not interleaved" in timing.note for timing in done.timings)
