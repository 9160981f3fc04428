"""Prompt lookup verifies drafts only while they are accepted; the tokens are those of greedy decoding in any case."""

from __future__ import annotations

import numpy as np
import pytest

from hf_rocm.generation.draft_search import DraftSearch, Search
from hf_rocm.generation.lookahead import Lookahead
from tests.generation.test_speculation import KINDS, before, equals_greedy, looked_up, repeating

SEARCH = Search(3, 1, 100, frozenset({9}))


def lengths(drafts, tokens, following, search=SEARCH):
    """Append these tokens one by one. Returns the number of drafts before each of them."""
    counts = []
    for token in following:
        result = drafts.of(np.array(tokens), search)
        counts.append(result.stop - result.start)
        tokens.append(token)
    return counts


def test_after_three_rejections_no_drafts_are_returned_until_one_would_be_accepted():
    # The token after the first 1 is 2, so the drafts after a 1 begin with 2.
    tokens, drafts = [1, 2, 3, 4, 1], DraftSearch(adaptive=True)
    assert lengths(drafts, tokens, [1, 1, 1]) == [3, 3, 3]
    assert lengths(drafts, tokens, [1, 1, 2]) == [0, 0, 0]
    # 2 was the first draft
    assert lengths(drafts, tokens, [3, 4]) == [3, 3]


def test_an_accepted_draft_resets_the_count():
    tokens, drafts = [1, 2, 1], DraftSearch(adaptive=True)
    assert 0 not in lengths(drafts, tokens, [1, 1, 2, 1, 1, 1, 2, 1, 1, 1])
    assert lengths(drafts, tokens, [1, 1]) == [3, 0]


def test_all_drafts_are_returned_unless_the_search_is_adaptive():
    assert lengths(DraftSearch(adaptive=False), [1, 2, 3, 4, 1], [1] * 6) == [3] * 6


def test_searches_without_drafts_are_not_counted():
    """There are no drafts if no token is repeated, or if the first draft is an EOS token."""
    tokens, drafts = [1, 9, 1], DraftSearch(adaptive=True)
    assert lengths(drafts, tokens, [1, 5, 6, 7, 1, 1]) == [0] * 6
    tokens = [1, 2, 1]
    assert lengths(drafts, tokens, [1, 1, 1]) == [2, 3, 3]


def test_a_second_search_over_the_same_tokens_counts_once():
    drafts = DraftSearch(adaptive=True)
    for rejections in range(3):
        tokens = np.array([1, 2, 3, 4, 1] + [1] * rejections)
        for _ in range(3):
            assert drafts.of(tokens, SEARCH) == slice(1, 4)


@pytest.fixture
def verified(monkeypatch):
    """The number of tokens of every step of a lookup."""
    counts, stock = [], Lookahead.candidates

    def candidates(self, input_ids, search):
        result = stock(self, input_ids, search)
        counts.append(result.shape[1] - input_ids.shape[1] + 1)
        return result

    monkeypatch.setattr(Lookahead, "candidates", candidates)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_stop_the_verification(kind, pair, verified, launched, queued):
    prepared, stock = pair(kind)
    for seed in (0, 1, 0, 1):
        verified.clear()
        inputs = repeating(seed)
        # The prompt alternates between one token and others, so that drafts after that token are random.
        inputs["input_ids"][:, ::2] = inputs["input_ids"][:, -1:]
        assert equals_greedy(looked_up(prepared, inputs, max_matching_ngram_size=1), stock, inputs)
        # Before 5.14, the drafts determine by how many tokens a call may exceed its maximum length.
        assert before("5.14") or (1 in verified and max(verified) > 1)
