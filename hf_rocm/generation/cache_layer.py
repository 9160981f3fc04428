"""The keys and values of one attention layer in a cache of recorded steps, and the sizes of their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Rows that a sliding layer has beyond its window. When they are used up, the window moves to the front.
SLACK = 256

# The smallest number of tokens that a cache has room for.
LEAST = 256

# The largest number of tokens that a recorded step writes: one plus the drafts that it verifies.
LONGEST_STEP = 21


class Layer:
    """The rows of one attention layer.

    keys: [B, Hkv, capacity, D]; values: [B, Hkv, capacity, D_v]; both None until the prompt is written. window: the
    number of keys that a query attends to, including its own, or None for all. base: the position of row 0; it changes
    only in sliding layers. rows: the number of written rows. places: [LONGEST_STEP] int64 on the device; a step of n
    tokens writes to the first n of these rows. place: [1], the first element of places. All layers with the same window
    share `places`.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys: Any = None
        self.values: Any = None
        self.base = 0
        self.rows = 0
        self.places: Any = None
        self.place: Any = None

    @property
    def buffers(self) -> tuple[Any, Any]:
        return self.keys, self.values

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def length(self) -> int:
        """The number of tokens seen so far."""
        return self.base + self.rows

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def room(self, capacity: int) -> int:
        """The number of rows that this layer needs in a cache for `capacity` tokens."""
        return capacity if self.window is None else min(capacity, self.window + SLACK)

    def kept(self, tokens: int, drafts: int) -> int:
        """Return how many of the last `tokens` tokens later queries may need if up to `drafts` of them are dropped."""
        return tokens if self.window is None else min(tokens, self.window + drafts)

    def allocate(self, key: Tensor, value: Tensor, rows: int) -> None:
        """Allocate buffers for heads with the shapes of key and value, and copy the rows that are already written."""
        old = self.buffers
        # Inference tensors can't be written outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.keys = _buffer(key, rows, old[0], self.rows)
            self.values = _buffer(value, rows, old[1], self.rows)

    def places_of(self, tokens: int) -> Any:
        """The rows of a step of this many tokens, [tokens] int64 on the device."""
        return self.place if tokens == 1 else self.places[:tokens]

    def count(self, rows: int) -> None:
        """Count more rows as written."""
        self.rows += rows

    def move_window(self, window: int) -> None:
        """Shift the rows that later queries may still attend to, so that they start at row 0."""
        visible = min(self.rows, window)
        for buffer in self.buffers:
            buffer[:, :, :visible].copy_(buffer[:, :, self.rows - visible : self.rows].clone())
        self.base += self.rows - visible
        self.rows = visible


def forget(layers: Sequence[Layer]) -> None:
    """Mark all rows of these layers as unwritten. Unwritten rows must be finite, so the buffers are set to zero."""
    for layer in layers:
        layer.base = layer.rows = 0
    buffers = [buffer for layer in layers for buffer in layer.buffers if buffer is not None]
    if buffers:
        # a few launches instead of one for each buffer
        torch._foreach_zero_(buffers)


def reorder(tensors: Sequence[Tensor], rows: Tensor) -> None:
    """Copy the rows of the batch with these indices, [B], to rows 0, 1, … of every tensor [B, …], in place."""
    for tensor in tensors:
        tensor.copy_(tensor.index_select(0, rows.to(tensor.device)))


def bucket(tokens: int) -> int:
    """A length that later calls can share: at least `tokens`, and at most 25 % more if it is above `LEAST`."""
    step = LEAST // 4
    while tokens > 8 * step:
        step *= 2
    return max(LEAST, -(-tokens // step) * step)


def fits(buffer: Tensor | None, heads: Tensor, rows: int) -> bool:
    """Return whether `rows` rows of these heads fit into the buffer, with at least one row left."""
    if buffer is None or (buffer.dtype, buffer.device) != (heads.dtype, heads.device):
        return False
    b, hkv, capacity, d = buffer.shape
    return (b, hkv, d) == (heads.shape[0], heads.shape[1], heads.shape[3]) and rows < capacity


def _buffer(like: Tensor, rows: int, old: Tensor | None, written: int) -> Tensor:
    buffer = like.new_zeros((like.shape[0], like.shape[1], rows, like.shape[3]))
    if old is not None and written:
        buffer[:, :, :written].copy_(old[:, :, :written])
        # The buffer may have been allocated on another stream.
        if old.is_cuda:
            old.record_stream(torch.cuda.current_stream(old.device))
    return buffer
