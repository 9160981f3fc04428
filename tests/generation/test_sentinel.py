"""Replays that become wrong later are detected at the next comparison. The call returns stock's tokens or raises."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import transformers

from hf_rocm.errors import GraphError
from hf_rocm.forwards import prompts
from hf_rocm.generation import ledger, pool, recorder, schedule
from hf_rocm.generation.state import known
from tests.generation import faults
from tests.generation.conftest import counted, generate, prompt

PERSISTENT = [
    faults.stale_input,
    faults.stale_pointer,
    faults.node_dropped,
    faults.gemm_dropped,
    faults.writes_reordered,
    faults.garbage,
    faults.garbage_logits,
    faults.garbage_in_the_cache,
    faults.stray_write,
    faults.not_finite,
]
# The first wrong replay → the replay in which it is detected. Replays 1, 2, 3, 5, 9, 17, … are compared.
NEXT = {1: 1, 2: 2, 4: 5, 6: 9, 12: 17}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def faulty(pair, monkeypatch):
    """A function that returns (prepared, stock). The prepared model has a fault in its replays `first` to `last`."""

    def build(fault, first, last=10**9, kind="llama"):
        monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(fault, first=first, last=last))
        return pair(kind, graphs=None)

    return build


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("first", NEXT)
@pytest.mark.parametrize("fault", PERSISTENT, ids=lambda fault: fault.__name__)
def test_a_fault_is_detected_at_the_next_comparison(fault, first, faulty):
    prepared, stock = faulty(fault, first)
    assert torch.equal(generate(prepared, new=25), generate(stock, new=25))
    (event,) = ledger.events()
    # The first replay has no stale input.
    expected = NEXT[max(first, 2) if fault is faults.stale_input else first]
    # results that are not finite may be detected earlier
    assert event.replays == expected or (fault is faults.not_finite and first < event.replays < NEXT[first])
    assert event.reason in known(prepared).disabled and event.model == "LlamaForCausalLM" and event.operators > 50
    assert known(prepared).pool.summary() == (0, 0)
    assert torch.equal(generate(prepared, new=25), generate(stock, new=25))
    assert len(ledger.events()) == 1


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
@pytest.mark.parametrize("fault", [faults.garbage, faults.node_dropped], ids=lambda fault: fault.__name__)
def test_a_fault_is_detected_while_windows_move(fault, kind, faulty):
    prepared, stock = faulty(fault, 6, kind=kind)
    assert torch.equal(generate(prepared, new=40), generate(stock, new=40))
    assert "differed from the step itself" in known(prepared).disabled


@pytest.mark.parametrize("at", [6, 7, 8])
@pytest.mark.parametrize(
    "fault", [faults.garbage, faults.garbage_logits, faults.garbage_in_the_cache], ids=lambda fault: fault.__name__
)
def test_wrong_cache_entries_of_one_replay_are_detected(fault, at, faulty):
    """The compared replay itself is correct.

    If the comparison did not recompute earlier steps, both sides would read the same wrong keys or token.
    """
    assert schedule.BACK >= 3
    prepared, stock = faulty(fault, at, at)
    assert torch.equal(generate(prepared, new=25), generate(stock, new=25))
    assert [event.replays for event in ledger.events()] == [9]


@pytest.mark.parametrize("fault", [faults.not_finite, faults.not_finite_logits], ids=lambda fault: fault.__name__)
def test_nonfinite_logits_cause_an_early_comparison(fault, faulty, monkeypatch):
    """Nonfinite logits occur only in replay 66, and without them the next comparison would be that of replay 129."""
    monkeypatch.setattr(pool, "_AHEAD", 200)
    prepared, stock = faulty(fault, 66, 66)
    assert torch.equal(generate(prepared, new=120), generate(stock, new=120))
    (event,) = ledger.events()
    assert 66 < event.replays <= 66 + 17


def test_nonfinite_logits_of_the_last_step_are_detected(faulty):
    prepared, stock = faulty(faults.not_finite, 7, 8)
    assert torch.equal(generate(prepared, new=11), generate(stock, new=11))
    (event,) = ledger.events()
    state = known(prepared)
    assert event.replays == 8 and "not finite" in state.disabled and state.wrong_replay == state.disabled


def test_nonfinite_logits_of_the_model_itself_are_not_a_fault(pair):
    prepared, stock = pair()

    def banned(module, args, output):
        return output.index_fill(-1, torch.tensor([5, 9]), -math.inf)

    # A user's own hook would be refused.
    banned.__module__ = "transformers"
    for model in (prepared, stock):
        model.lm_head.register_forward_hook(banned)
    for _ in range(2):
        assert torch.equal(generate(prepared, new=25), generate(stock, new=25))
    assert counted(prepared) == (1, 21 + 24) and not ledger.events()


def test_sampling_equals_an_uncaptured_call(faulty):
    prepared, stock = faulty(faults.garbage, 6)
    settings = {"do_sample": True, "top_k": 20, "temperature": 1.3, "seed": 3, "new": 25}
    expected = generate(stock, **settings), torch.rand(3)
    assert torch.equal(generate(prepared, **settings), expected[0]) and torch.equal(torch.rand(3), expected[1])
    assert len(ledger.events()) == 1


def test_a_fault_is_detected_after_a_row_has_ended(faulty):
    prepared, stock = faulty(faults.garbage, 6)
    free = generate(stock, repetition_penalty=9.0)
    settings = {"eos_token_id": [free[0, 9].item()], "repetition_penalty": 9.0, "new": 25}
    assert torch.equal(generate(prepared, **settings), generate(stock, **settings))
    assert len(ledger.events()) == 1


def test_a_fault_is_detected_with_the_deferred_check(faulty, ends_checked_late):
    prepared, stock = faulty(faults.garbage, 6)
    ends = generate(stock, prompt(rows=1), repetition_penalty=9.0, new=25)[0, 22].item()
    settings = {"eos_token_id": ends, "repetition_penalty": 9.0, "new": 25}
    assert torch.equal(generate(prepared, prompt(rows=1), **settings), generate(stock, prompt(rows=1), **settings))
    assert len(ledger.events()) == 1


def test_wrong_tokens_that_a_streamer_has_received_raise(faulty):
    prepared, stock = faulty(faults.garbage, 6)
    streamer = Streamer()
    with pytest.raises(GraphError, match="the streamer has received"):
        generate(prepared, prompt(rows=1), streamer=streamer, new=25)
    assert not streamer.ended and len(streamer.tokens) < 20
    assert torch.equal(generate(prepared, prompt(rows=1)), generate(stock, prompt(rows=1)))


def test_a_streamer_that_received_correct_tokens_continues(faulty):
    """No token depends on the fault, which is only in the cache and in the last step before the comparison."""
    prepared, stock = faulty(faults.garbage_in_the_cache, 8)
    streamers = Streamer(), Streamer()
    for model, streamer in zip((prepared, stock), streamers, strict=True):
        generate(model, prompt(rows=1), streamer=streamer, new=25)
    assert streamers[0].tokens == streamers[1].tokens and streamers[0].ended == 1
    assert len(ledger.events()) == 1


def test_tokens_that_a_users_criterion_has_received_raise(faulty):
    prepared, stock = faulty(faults.garbage, 6)

    class Never(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return torch.zeros(len(ids), dtype=torch.bool)

    criteria = transformers.StoppingCriteriaList([Never()])
    with pytest.raises(GraphError, match="Never has received them") as raised:
        generate(prepared, new=25, stopping_criteria=criteria)
    assert raised.value.hint and "the last 3 steps" in str(raised.value)
    assert torch.equal(generate(prepared, new=25, stopping_criteria=criteria), generate(stock, new=25))


def test_a_difference_before_any_used_replay_needs_no_restart(faulty):
    """The first comparison detects the fault, before the result of any replay is used."""
    prepared, stock = faulty(faults.garbage, 1)
    streamer = Streamer()
    assert torch.equal(
        generate(prepared, prompt(rows=1), streamer=streamer, new=25), generate(stock, prompt(rows=1), new=25)
    )
    assert streamer.ended == 1


def test_required_graphs_raise(pair, monkeypatch):
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(faults.garbage, first=6))
    prepared, _ = pair(graphs=True)
    with pytest.raises(GraphError, match="differed from the step itself"):
        generate(prepared, new=25)
    assert len(ledger.events()) == 1


@pytest.mark.parametrize("call", [2, 3])
def test_the_first_replays_of_the_next_calls_are_compared(call, faulty):
    # Nine replays in the first call, 11 in each later call.
    faulty_replay = 10 + 11 * (call - 2)
    prepared, stock = faulty(faults.garbage, faulty_replay)
    first = generate(stock, new=12)
    for _ in range(call):
        assert torch.equal(generate(prepared, new=12), first)
    assert [event.replays for event in ledger.events()] == [faulty_replay]


def test_the_first_replay_of_a_later_call_is_compared_after_enough_replays(faulty, monkeypatch):
    """Replays are wrong from the fifth call on.

    The first of them is compared, because enough replays have run since the last comparison.
    """
    monkeypatch.setattr(schedule, "BETWEEN_CALLS", 10)
    prepared, stock = faulty(faults.garbage, 43)
    first = generate(stock, new=12)
    # These calls run replays 1 to 42; replay 32 is the last one that is compared.
    for _ in range(4):
        assert torch.equal(generate(prepared, new=12), first)
    assert not ledger.events()
    assert torch.equal(generate(prepared, new=12), first)
    assert [event.replays for event in ledger.events()] == [43]


def test_comparisons_are_rare_in_short_calls():
    plan = schedule.Schedule()
    compared = []
    for call in range(1, 40):
        plan.enter(call)
        if plan.due:
            compared.append(call)
        for _ in range(100):
            plan.agreed() if plan.due else plan.count()
    # after the third call, comparing the first replay of a call costs an uncaptured step and a replay
    assert compared[:3] == [1, 2, 3] and (3.6 + 1) / schedule.BETWEEN_CALLS < 0.01
    assert all(later - call > 1 for call, later in itertools.pairwise(compared[3:])) and len(compared) > 5


def test_comparisons_become_rarer_up_to_a_limit():
    plan = schedule.Schedule()
    compared = []
    for number in range(1, 20_000):
        if plan.due:
            plan.agreed()
            compared.append(number)
        else:
            plan.count()
    assert compared[:8] == [1, 2, 3, 5, 9, 17, 33, 65]
    gaps = [two - one for one, two in itertools.pairwise(compared)]
    assert gaps == sorted(gaps) and gaps[-1] == schedule.LONGEST
    assert plan.replays == 19_999 and plan.since < schedule.LONGEST
    # asymptotic cost relative to the replays; an uncaptured step takes at most 3.6 times as long as a replay
    assert (schedule.BACK + 1) / schedule.LONGEST * 3.6 < 0.01


def test_comparisons_add_few_uncaptured_steps(pair, monkeypatch):
    """The model is called for the prompt, for two steps, and for the comparisons of replays 1, 2, 3, 5, 9 and 17.

    A comparison also recomputes up to four earlier steps that were not compared.
    """
    # Prompts are recorded and compared separately.
    monkeypatch.setattr(prompts, "_MOST_TOKENS", 0)
    prepared, _ = pair()
    calls = []

    def count(module, args, output):
        calls.append(1)

    # A user's own hook would be refused.
    count.__module__ = "transformers"
    prepared.lm_head.register_forward_hook(count)
    generate(prepared, new=25)
    first = len(calls)
    generate(prepared, new=25)
    # on a CPU, the recording also calls the model
    assert first == 1 + 2 + 1 + 1 + 13
    # the prompt, the comparison of the call's first replay, and that of its 17th, with the four steps before it
    assert len(calls) - first == 1 + 1 + 1 + schedule.BACK
    generate(prepared, new=10)
    second = len(calls)
    generate(prepared, new=10)
    # In the fourth call, the model is called only for the prompt.
    assert len(calls) - second == 1
