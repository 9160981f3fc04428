"""The tokens of a call that verifies drafts, on the host, as far as they are known without a copy from the device.

After a recorded step the accepted tokens are on the host anyway. So the search for drafts and the check for end tokens
need no other copy, unless transformers has appended tokens in another way, for example after an uncaptured step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class HostTokens:
    """The tokens of one sequence. drafts: the drafts of the current step, [N] int64, or None if they are not known."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.int64)
        self._length = 0  # 0: unknown
        self.drafts: np.ndarray[Any, Any] | None = None

    def of(self, input_ids: Tensor) -> np.ndarray[Any, Any]:
        """Return the tokens of input_ids [1, S] as [S] int64, without a copy from the device if they are known."""
        if self._length != input_ids.shape[1]:
            self._length = 0
            self._write(input_ids[0].cpu().numpy())
        return self._buffer[: self._length]

    def append(self, tokens: Tensor, to: int) -> None:
        """Append tokens [1, N] that are on the host to a sequence of length `to`."""
        if self._length == to:
            self._write(tokens[0].numpy())
        else:
            self._length = 0

    def forget(self) -> None:
        """Forget all tokens, because the ones on the device may have been changed."""
        self._length, self.drafts = 0, None

    def last(self, length: int) -> int | None:
        """Return the last token of a sequence of this length, with or without the current drafts, or None."""
        if 0 < self._length == length:
            return int(self._buffer[length - 1])
        drafts = self.drafts
        known = self._length and drafts is not None and len(drafts) and self._length + len(drafts) == length
        return int(drafts[-1]) if known and drafts is not None else None

    def drafts_of(self, tokens: Tensor) -> Tensor:
        """Return the drafts of a step, [1, N], on the host. tokens: the same drafts on the device."""
        if self.drafts is None or len(self.drafts) != tokens.shape[1]:
            return tokens.cpu()
        return torch.from_numpy(self.drafts)[None]

    def _write(self, tokens: np.ndarray[Any, Any]) -> None:
        length = self._length + len(tokens)
        if length > len(self._buffer):
            grown = np.empty(2 * length, np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : length] = tokens
        self._length = length
