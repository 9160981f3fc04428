"""The search for drafts in prompt lookup. In greedy decoding, it can return no drafts while earlier ones are rejected.

A step that verifies drafts takes longer than a step without drafts: up to 1.3 times as long with five drafts. In text
that does not repeat its prompt, decoding without drafts would be faster. Whether a draft is accepted can be determined
without verifying it: its token is compared with the token that a step without drafts has chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# With one accepted draft in every four steps, verifying drafts and decoding without them take about equally long.
_REJECTIONS = 3


class DraftSearch:
    """Finds the drafts of one call. adaptive: whether to return no drafts while earlier ones are rejected.

    After three searches in a row whose first draft was not the next token, `of` returns no drafts, until the first
    draft of a later search is the next token.
    """

    def __init__(self, *, adaptive: bool) -> None:
        self._adaptive = adaptive
        # the number of searches in a row whose first draft was not the next token
        self._rejections = 0
        # the number of tokens at the last search that returned drafts, and its first draft
        self._draft: tuple[int, int] | None = None

    def of(self, tokens: np.ndarray[Any, Any], search: Search) -> slice:
        """Return the slice of these tokens, [S], that contains the drafts that are worth verifying; it may be empty."""
        if self._draft is not None and len(tokens) > self._draft[0]:
            length, first = self._draft
            self._rejections = 0 if tokens[length] == first else self._rejections + 1
            self._draft = None
        drafts = search.drafts(tokens)
        if not self._adaptive:
            return drafts
        if drafts.start < drafts.stop:
            self._draft = len(tokens), int(tokens[drafts.start])
        return drafts if self._rejections < _REJECTIONS else slice(0, 0)


class Search(NamedTuple):
    """A search for the tokens that follow the first earlier occurrence of the last n-gram: the drafts of prompt lookup.

    most: the largest number of drafts. ngram: the length of the longest n-gram, which is tried first. limit: the
    maximum length of the sequence. ends: EOS tokens; drafts stop before them.
    """

    most: int
    ngram: int
    limit: int
    ends: frozenset[int]

    def drafts(self, tokens: np.ndarray[Any, Any]) -> slice:
        """Return the slice of these tokens, [S], that contains the drafts; it is empty if there are none.

        They are the drafts of transformers' `PromptLookupCandidateGenerator`.
        """
        length = len(tokens)
        none = slice(0, 0)
        if self.limit == length + 1:
            return none
        for size in range(min(self.ngram, length - 1), 0, -1):
            last = length - size
            same = tokens[:last] == tokens[last]
            for offset in range(1, size):
                same &= tokens[offset : last + offset] == tokens[last + offset]
            first = int(same.argmax())
            start = first + size
            stop = min(start + self.most, length, self.limit)
            if not same[first] or start >= stop:
                continue
            drafts = tokens[start:stop].tolist()
            end = next((index for index, token in enumerate(drafts) if token in self.ends), len(drafts))
            return slice(start, start + end)
        return none
