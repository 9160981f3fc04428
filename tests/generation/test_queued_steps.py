"""Steps of prompt lookup that are queued before their tokens are on the host read the tokens of the sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_rocm.errors import GraphError
from hf_rocm.generation import cache_layer, lookahead
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.draft_search import Search
from hf_rocm.generation.host_tokens import HostTokens
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.generation.recorded_step import Alarm
from tests.generation.test_speculation import KINDS, equals_greedy, looked_up, repeating


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_queued_steps_are_those_of_the_loop(kind, tokens, pair, launched, queued, monkeypatch):
    monkeypatch.setattr(cache_layer, "SLACK", 30)
    prepared, stock = pair(kind)
    for seed in (0, 1, 0, 1, 2, 3, 2):
        inputs = repeating(seed, padded=3 * (seed % 2))
        arguments = {"max_matching_ngram_size": 1 + seed % 3}
        with torch.inference_mode(seed == 1):
            assert equals_greedy(looked_up(prepared, inputs, tokens=tokens, **arguments), stock, inputs)
    # with at most one draft, the number of drafts may change so rarely that every launched step was queued
    assert 8 < len(queued) < len(launched) + (tokens == 1)
    assert sum(step.served for step in launched) > 8


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_step_is_queued_beyond_the_maximum_length(count, monkeypatch):
    """Reading beyond a table of learned position embeddings causes a device-side error."""
    monkeypatch.setattr(Lookahead, "_saves_time", lambda self, times: True)
    # The last positions of the queued steps.
    last = []

    def launch(position, tokens, source):
        # Without drafts, the position is known.
        assert (position is None) == (tokens > 1)
        last.append((int(source.header[0]) if position is None else position) + tokens - 1)

    for limit in range(6, 22):
        tokens, ids = HostTokens(), torch.tensor([[5, 6, 7, 5, 6]])
        ahead = Lookahead(tokens, early=True)
        ahead.candidates(ids, Search(4, 2, limit, frozenset()))
        # All drafts are accepted.
        selected = torch.tensor([[7, 5, 6, 7, 5]])[:, :count]
        step = torch.cat((ids[:, -1:], selected[:, :-1]), dim=1)
        ahead.queue(selected, step, torch.empty(0), SimpleNamespace(launch=launch))
        assert not last or last[-1] < limit
    assert last == [5 + 2 * count - 2] * len(last) and len(last) > 5


def test_steps_are_queued_if_they_probably_save_time():
    ahead = Lookahead(HostTokens(), early=True)
    ahead._interval, ahead._gap = 1.0, 0.125
    assert [ahead._saves_time(times) for times in (0, 6, 7, 8, 30)] == [False, False, False, True, True]
    ahead._interval = 4.0
    assert not ahead._saves_time(31) and ahead._saves_time(32)


def search_wrongly(monkeypatch):
    """Make the search on the device return drafts that begin one token too early."""
    search = lookahead.look_up_drafts

    def wrong(*tensors, **keywords):
        search(*tensors, **keywords)
        # header[1] is the position at which the drafts begin.
        tensors[3][1] -= 1

    monkeypatch.setattr(lookahead, "look_up_drafts", wrong)


def test_a_queued_step_with_other_tokens_raises(pair, queued, monkeypatch):
    prepared, _ = pair()
    for seed in range(2):
        looked_up(prepared, repeating(seed))
    search_wrongly(monkeypatch)
    with pytest.raises(GraphError, match="tokens other than"):
        for seed in range(6):
            looked_up(prepared, repeating(seed))


def test_a_queued_step_that_is_compared_is_checked_too(pair, queued, monkeypatch):
    """After an alarm, the loop gets the logits of uncaptured steps and launches no step, so the check runs later."""
    prepared, stock = pair()
    for seed in (0, 1, 2, 3, 2):
        looked_up(prepared, repeating(seed))
    search_wrongly(monkeypatch)
    monkeypatch.setattr(Alarm, "poll", lambda self, replays: any(tokens > 1 for *_, tokens in queued))
    raised = 0
    for seed in range(8):
        queued.clear()
        try:
            assert torch.equal(looked_up(prepared, repeating(seed)), looked_up(stock, repeating(seed)))
        except GraphError as error:
            raised += "tokens other than" in str(error)
    assert raised > 1


def test_rows_are_written_again_after_a_queued_step_that_is_not_used():
    """The queued step has written the rows of its own position to the same tensor."""
    cache = DecodeCache([None], capacity=cache_layer.LEAST, limit=cache_layer.LEAST)
    cache.drafts = 3
    cache.update(*torch.ones(2, 1, 1, 5, 4), 0)
    cache.aim(3)
    ((rows, _),) = cache.relative_places()
    rows.fill_(9)
    cache.aim(3)
    assert rows[:3].tolist() == [5, 6, 7]
