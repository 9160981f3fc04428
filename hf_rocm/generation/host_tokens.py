"""The host's copy of the tokens of a call that verifies drafts, to avoid further copies from the device.

After a recorded step, the accepted tokens are on the host anyway. So the search for drafts and the check for EOS tokens
need no other copy, unless transformers has appended tokens in another way, for example after an uncaptured step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class HostTokens:
    """The tokens of one sequence, and the drafts of its current step.

    Values are known for one tensor of tokens, and for one tensor of tokens and drafts. For any other tensor, even
    one of the same length, the values are copied: the sequence may have been continued in an uncaptured step, or may
    belong to a nested call.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.int64)
        self._length = 0
        # The tensor with the tokens in the buffer.
        self._tokens: Unchanged | None = None
        # The tensor with the tokens and the drafts.
        self._candidates: Unchanged | None = None
        # The last token before the drafts, and the drafts.
        self._step: list[int] = []
        # See `constant`.
        self._constant: tuple[Unchanged, Tensor] | None = None
        # The address of the first draft.
        self._address = 0

    def of(self, input_ids: Tensor) -> np.ndarray[Any, Any]:
        """Return the tokens of input_ids [1, S] as [S] int64, without a copy from the device if they are known."""
        if not self.has(input_ids):
            self._length = 0
            self._write(input_ids[0].cpu().numpy(), input_ids)
        return self._buffer[: self._length]

    def has(self, input_ids: Tensor) -> bool:
        """Whether `of` returns these tokens without a copy."""
        return self._tokens is not None and self._tokens.matches(input_ids)

    @property
    def on_device(self) -> Tensor | None:
        """The tensor whose tokens are known, [1, S]; None if there is none, or if it was changed."""
        known = self._tokens
        return known.tensor if known is not None and known.matches(known.tensor) else None

    def append(self, tokens: Tensor, *, before: Tensor, after: Tensor) -> None:
        """Append tokens [1, N] that are on the host. If `before` is not known, no tokens are known afterwards.

        before, after: the tokens on the device, [1, S] and [1, S + N].
        """
        if self.has(before):
            self._write(tokens[0].numpy(), after)
        else:
            self._tokens = None

    def draft(self, drafts: list[int], candidates: Tensor) -> None:
        """Record the N > 0 drafts of a step. candidates: the tokens and the drafts, [1, S + N]."""
        self._step = [*self._last(), *drafts]
        self._candidates = Unchanged(candidates)
        self._address = candidates[:, -len(drafts) :].data_ptr()

    def followed_by(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the tokens so far, followed by these, [S + N], without appending these. Valid until the next call."""
        length = self._length + len(tokens)
        if length > len(self._buffer):
            grown = np.empty(2 * length, np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : length] = tokens
        return self._buffer[:length]

    def step_of(self, input_ids: Tensor) -> list[int] | None:
        """Return the last token, followed by the drafts of the step if input_ids ends with them; None if unknown."""
        if self.has(input_ids) and self._length:
            return self._last()
        candidates = self._candidates
        return self._step if candidates is not None and candidates.matches(input_ids) else None

    def forget(self) -> None:
        """Discard all tokens, because those on the device may have been changed."""
        self._tokens = self._candidates = None

    def constant(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host of a tensor that every step reads. It is copied again only if it has changed."""
        if self._constant is None or not self._constant[0].matches(tensor):
            self._constant = Unchanged(tensor), tensor.cpu()
        return self._constant[1]

    def last(self, input_ids: Tensor) -> int | None:
        """Return the last token of input_ids, which may end with the drafts of the current step; None if unknown."""
        step = self.step_of(input_ids)
        return None if step is None else step[-1]

    def drafts_of(self, tokens: Tensor) -> Tensor:
        """Return the drafts of a step, [1, N], on the host. tokens: the same drafts on the device."""
        candidates = self._candidates
        known = candidates is not None and candidates.matches(candidates.tensor)
        drafts = self._step[1:]
        if not known or tokens.shape != (1, len(drafts)) or tokens.data_ptr() != self._address:
            return tokens.cpu()
        return torch.tensor([drafts])

    def _last(self) -> list[int]:
        """A list that contains the last token; empty if there are no tokens."""
        last: list[int] = self._buffer[max(self._length - 1, 0) : self._length].tolist()
        return last

    def _write(self, tokens: np.ndarray[Any, Any], input_ids: Tensor) -> None:
        self._length, self._tokens = len(self.followed_by(tokens)), Unchanged(input_ids)


def accepted_tokens(drafts: list[int], chosen: list[int]) -> list[int]:
    """The tokens that transformers' loop appends after a step that verified N drafts and chose these N + 1 tokens."""
    count = next((index for index, draft in enumerate(drafts) if draft != chosen[index]), len(drafts))
    return chosen[: count + 1]


class Unchanged:
    """A tensor whose values were read. In-place changes are detected, except in inference tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._version = _version(tensor)

    def matches(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor with the same values."""
        return tensor is self.tensor and _version(tensor) == self._version


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
