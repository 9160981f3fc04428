"""Drafts of an assistant and the steps that verify them are launched before transformers prepares them."""

from __future__ import annotations

import pytest

from hf_rocm.generation import drafting
from hf_rocm.generation.assistant import Rounds
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.generation.runner import Runner
from tests.generation.test_drafting import CALLS, compare, drafts, trio  # noqa: F401


def test_rounds_begin_before_transformers_prepares_them(trio, drafts, monkeypatch):  # noqa: F811
    used, serves = [], drafting.Begun.serves

    def counting(begun, *args, **kwargs):
        used.append(serves(begun, *args, **kwargs))
        return used[-1]

    monkeypatch.setattr(drafting.Begun, "serves", counting)
    skipped = compare(*trio(), drafts)
    # At the end of a call, fewer drafts may be allowed than were launched.
    assert len(used) - CALLS <= sum(used) and sum(used) > skipped / 2


def test_a_round_that_began_with_other_tokens_is_not_used(trio, drafts, monkeypatch):  # noqa: F811
    used, verified = [], Rounds.verified

    def wrong(rounds, selected, on_host, verifier, launched):
        verified(rounds, (selected + 1) % 60, (on_host + 1) % 60, verifier, launched=launched)
        used.append(rounds._drafts is not None and rounds._drafts._begun is not None)

    monkeypatch.setattr(Rounds, "verified", wrong)
    assert compare(*trio(), drafts) > CALLS and any(used)


@pytest.fixture
def launches(monkeypatch):
    """For every verifying step that was launched early, whether the loop used it."""
    used, take = [], Lookahead.take

    def takes(lookahead, length):
        launched, step = lookahead.launched, take(lookahead, length)
        if launched is not None:
            used.append(step is launched.step)
        return step

    monkeypatch.setattr(Lookahead, "take", takes)
    return used


def test_drafts_are_verified_by_a_step_that_is_launched_early(trio, drafts, launches):  # noqa: F811
    skipped = compare(*trio(), drafts)
    assert all(launches) and len(launches) > skipped / 2


@pytest.fixture
def guesses(monkeypatch):
    """For every call to `Drafts.go_on`: whether it launched only the first draft, and whether that was launched before.

    With `_LIKELY = 1`, the first draft is launched after every round whose drafts were all accepted.
    """
    guessed, right, go_on = [], [], drafting.Drafts.go_on

    def goes_on(self, *args, launched):
        right.append(self._begun.drafts == 1)
        go_on(self, *args, launched=launched)
        guessed.append(self._begun is not None and launched == self._begun.drafts == 1)

    monkeypatch.setattr("hf_rocm.generation.assistant._LIKELY", 1)
    monkeypatch.setattr(drafting.Drafts, "go_on", goes_on)
    return guessed, right


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_draft_is_launched_after_a_verifying_step_that_probably_accepts_all(noise, trio, drafts, guesses):  # noqa: F811
    compare(*trio(noise=noise, number=3), drafts, new=120)
    guessed, right = map(sum, guesses)
    # Without noise, all drafts are accepted.
    assert 0 < right <= guessed and (right < guessed) is (noise > 0)


def test_a_draft_after_a_verifying_step_that_was_not_used_is_dropped(trio, drafts, guesses, monkeypatch):  # noqa: F811
    """The step that the loop runs instead may select another token."""
    launch = Lookahead.launch_candidates

    def differs(lookahead, candidates, *args):
        step = launch(lookahead, candidates, *args)
        if step is not None:
            lookahead.launched.position = -1
            step.tokens[:, -1] = (step.tokens[:, -1] + 1) % 60
        return step

    monkeypatch.setattr(Lookahead, "launch_candidates", differs)
    monkeypatch.setattr(Lookahead, "take", lambda *_: None)
    compare(*trio(noise=0.0, number=3), drafts, new=120)
    assert sum(guesses[0]) > 0 and not any(guesses[1])


def test_a_verifying_step_with_other_tokens_is_not_used(trio, drafts, launches, monkeypatch):  # noqa: F811
    launch = Lookahead.launch_candidates

    def wrong(lookahead, candidates, *args):
        return launch(lookahead, (candidates + 1) % 60, *args)

    monkeypatch.setattr(Lookahead, "launch_candidates", wrong)
    compare(*trio(), drafts)
    assert launches and not any(launches)


@pytest.mark.parametrize("early", [True, False])
def test_a_round_with_a_step_that_cannot_be_replayed_calls_generate(early, trio, drafts, monkeypatch):  # noqa: F811
    advance, count = Runner.advance, [0]

    def failing(runner, *args):
        count[0] += 1
        return None if count[0] % 7 == 0 else advance(runner, *args)

    monkeypatch.setattr(Runner, "advance", failing)
    if not early:
        monkeypatch.setattr(drafting.Drafts, "begin", lambda *_, **__: None)
    skipped = compare(*trio(), drafts)
    assert skipped > 0 and count[0] > 7
