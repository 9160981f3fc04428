"""The cache that decode steps are recorded over: buffers that stay where they are, lengths that the host knows.

It is a transformers `Cache` in every release. While it is empty it behaves like a dynamic one, so that a prompt costs
what it costs in stock: attention sees the prompt's own keys, and no mask spans the unwritten rows. From then on every
step of one token writes to a row that the device reads from `place`, so that a recording of the step stays valid; what
changes a recording's meaning (a buffer that grew, a window that moved on) happens on the host between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_rocm.generation.step import Unrecordable
from hf_rocm.layers.slots import Slot

# Rows that a sliding layer has beyond its window. When they are used up, the window moves to the front.
SLACK = 256

# The fewest tokens that a cache has room for.
LEAST = 256


class Layer:
    """The rows of one attention layer.

    keys: [B, Hkv, capacity, D]; values: [B, Hkv, capacity, D_v]; both None until the prompt arrives. window: how many
    keys a query sees, itself included, or None for all. base: the position that lies in row 0; it only moves in a
    sliding layer. rows: how many are written. place: [1] int64 on the device, the row that the coming step writes; it
    is one tensor for all layers of the same window.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys: Any = None
        self.values: Any = None
        self.base = 0
        self.rows = 0
        self.place: Any = None

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def length(self) -> int:
        """How many tokens were seen."""
        return self.base + self.rows

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def room(self, capacity: int) -> int:
        """How many rows this layer needs in a cache for so many tokens."""
        return capacity if self.window is None else min(capacity, self.window + SLACK)

    def allocate(self, key: Tensor, value: Tensor, rows: int) -> None:
        """Buffers for heads like these; what was written stays."""
        old = self.keys, self.values
        with torch.inference_mode(False), torch.no_grad():  # else they could not be written to outside of it
            self.keys = _buffer(key, rows, old[0], self.rows)
            self.values = _buffer(value, rows, old[1], self.rows)

    def count(self) -> None:
        """One more row is written."""
        self.rows += 1

    def move_window(self, window: int) -> None:
        """Bring the rows that later queries still see to the front."""
        kept = min(self.rows, window)
        for buffer in (self.keys, self.values):
            buffer[:, :, :kept].copy_(buffer[:, :, self.rows - kept : self.rows].clone())
        self.base += self.rows - kept
        self.rows = kept

    def forget(self) -> None:
        """Nothing is written any more. What lies behind the written rows must be finite, so the buffers are zeroed."""
        self.base = self.rows = 0
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer.zero_()


class DecodeCache(Cache):
    """See above. `layers` has a `Layer` for each attention layer.

    limit: the most tokens that this call can come to; the buffers grow towards it.
    """

    def __init__(self, windows: Sequence[int | None], *, capacity: int, limit: int) -> None:
        self.layers: Any = [Layer(window) for window in windows]
        self.target = capacity
        self.limit = limit
        self.recordings: dict[Any, Any] = {}  # of steps over these buffers, and their recorder; see runner.py
        self.recording = False
        self._places: dict[int | None, tuple[Tensor, Layer]] = {}  # window → the tensor, and a layer that it serves
        self._placed = -1  # the length that the places were set for
        self._spare = 0  # how many tokens fit before a layer has to make room
        # what transformers' own methods look at
        self.layer_class_to_replicate = None
        self.offloading = False

    # What the runner needs

    @property
    def length(self) -> int:
        return self.layers[-1].length

    @property
    def capacity(self) -> int:
        """How many tokens fit before a buffer has to grow."""
        return max(layer.capacity for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def has_room(self) -> bool:
        """Whether the coming token fits where the buffers are."""
        return self._spare > 0

    def aim(self) -> None:
        """Make room for one token in every layer, and tell the device the rows that it goes to; twice does no more."""
        if self._placed == self.length:
            return
        if self.recording:
            raise Unrecordable("the step writes to the cache more than once")
        if self._spare <= 0:
            self._make_room()
        with torch.inference_mode(False), torch.no_grad():
            for place, layer in self._places.values():
                place.fill_(layer.rows)
        self._placed = self.length
        self._spare -= 1

    def advance(self) -> None:
        """Count the token of a replayed step, in which no Python ran."""
        for layer in self.layers:
            layer.rows += 1

    def rewind(self) -> None:
        """Forget the last token again, so that the same step can run once more."""
        for layer in self.layers:
            layer.rows -= 1

    def level(self, length: int) -> None:
        """Have seen so many tokens in every layer, after a step that broke off among them."""
        for layer in self.layers:
            layer.rows = length - layer.base

    def written(self) -> list[Tensor]:
        """Copies of the rows that the last step wrote: [B, Hkv, D] each."""
        found = []
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            found += [layer.keys[:, :, layer.rows - 1].clone(), layer.values[:, :, layer.rows - 1].clone()]
        return found

    @contextmanager
    def being_recorded(self) -> Iterator[None]:
        """Within, lengths are device tensors, and what only the host could know is refused."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def _make_room(self) -> None:
        for layer in self.layers:
            if layer.rows == layer.capacity and layer.window is not None and layer.rows >= layer.window:
                layer.move_window(layer.window)
            if layer.rows == layer.capacity:
                self._grow(layer)
            self._give_place(layer)
        self._spare = min(layer.capacity - layer.rows for layer in self.layers)

    def _grow(self, layer: Layer) -> None:
        self.recordings.clear()
        tokens = max(layer.rows + 1, min(2 * layer.capacity, self.limit))
        layer.allocate(layer.keys, layer.values, layer.room(bucket(tokens)))

    def _give_place(self, layer: Layer) -> None:
        place = self._places.get(layer.window)
        if place is None or place[0].device != layer.keys.device:
            with torch.inference_mode(False):
                place = torch.zeros(1, dtype=torch.int64, device=layer.keys.device), layer
            self._places[layer.window] = place
        layer.place = place[0]

    # What transformers asks of a cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a call's keys [B, Hkv, S, D] and values [B, Hkv, S, D_v]; returns what its queries may see."""
        layer = self.layers[layer_idx]
        count = key_states.shape[2]
        if not layer.rows:
            return self._write_prompt(layer, key_states, value_states)
        if count > 1:
            return self._write_more(layer, key_states, value_states)
        if self._placed != layer.length:
            self.aim()
        return self._write_one(layer, key_states, value_states)

    def _write_one(self, layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layer.keys.index_copy_(2, layer.place, key)
        layer.values.index_copy_(2, layer.place, value)
        layer.rows += 1
        return layer.keys, layer.values

    def _hf_rocm_slot(self, layer_idx: int, count: int) -> Slot | None:
        """Where one token's keys and values go, for a kernel that writes them itself; None: `update` must be asked."""
        layer = self.layers[layer_idx]
        if count != 1 or not layer.rows:
            return None
        if self._placed != layer.length:
            self.aim()
        return Slot(layer.keys, layer.values, layer.place, layer.count)

    def _write_prompt(self, layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        count = key.shape[2]
        kept = count if layer.window is None else min(count, layer.window)
        rows = layer.room(max(self.target, bucket(count + 1)))
        self._spare = 0
        if not _fits(layer.keys, key, kept) or not _fits(layer.values, value, kept):
            self.recordings.clear()
            layer.keys = layer.values = None
            layer.allocate(key, value, rows)
        layer.keys[:, :, :kept].copy_(key[:, :, count - kept :])
        layer.values[:, :, :kept].copy_(value[:, :, count - kept :])
        layer.base, layer.rows = count - kept, kept
        return key, value

    def _write_more(self, layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Several tokens behind others: as a dynamic cache does it."""
        if self.recording:
            raise Unrecordable("the step writes more than one token")
        self._spare = 0
        count = key.shape[2]
        key = torch.cat((layer.keys[:, :, : layer.rows], key), dim=2)
        value = torch.cat((layer.values[:, :, : layer.rows], value), dim=2)
        total = layer.rows + count
        kept = total if layer.window is None else min(total, layer.window)
        if kept > layer.capacity:
            self.recordings.clear()
            layer.allocate(key, value, layer.room(bucket(kept + 1)))
        layer.keys[:, :, :kept].copy_(key[:, :, total - kept :])
        layer.values[:, :, :kept].copy_(value[:, :, total - kept :])
        layer.base += total - kept
        layer.rows = kept
        return key, value

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> Any:
        """How many tokens were seen; on the device while a step is recorded."""
        layer = self.layers[layer_idx if layer_idx < len(self.layers) else 0]
        if self.recording:
            if layer.window is not None:
                raise Unrecordable("the step asks a sliding layer for its length")
            return layer.place[0]
        return layer.length

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(number of keys that attention will see, the position of the first of them)."""
        if self.recording:
            raise Unrecordable("the step makes its masks itself")
        layer = self.layers[layer_idx if layer_idx < len(self.layers) else 0]
        count = query if isinstance(query, int) else query.shape[0]
        if count == 1 and layer.rows:
            self.aim()
            return layer.capacity, layer.base
        return layer.rows + count, layer.base

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return max(self.target, self.layers[layer_idx].capacity)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.get_max_cache_shape(layer_idx or 0)

    def reset(self) -> None:
        for layer in self.layers:
            layer.forget()
        self._placed = -1
        self._spare = 0

    def crop(self, max_length: int) -> None:
        raise NotImplementedError("a cache of recorded steps can't be cropped; pass a DynamicCache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        first = self.layers[0].keys
        self._select(torch.arange(len(first), device=first.device).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        self.recordings.clear()
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys.index_select(0, rows.to(layer.keys.device))
                layer.values = layer.values.index_select(0, rows.to(layer.values.device))

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_compileable(self) -> bool:
        """Whether the coming call goes over the static buffers: the prompt's masks are those of a dynamic cache."""
        return self.length > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.window is not None for layer in self.layers]

    @property
    def is_initialized(self) -> bool:
        return self.layers[0].keys is not None

    @property
    def max_batch_size(self) -> int:
        keys = self.layers[0].keys
        return -1 if keys is None else len(keys)

    batch_size = max_batch_size

    @property
    def max_cache_len(self) -> int:
        return self.get_max_cache_shape()


def bucket(tokens: int) -> int:
    """A length that later calls can share: at least so many, and at most a quarter more beyond the least."""
    step = LEAST // 4
    while tokens > 8 * step:
        step *= 2
    return max(LEAST, -(-tokens // step) * step)


def _buffer(like: Tensor, rows: int, old: Tensor | None, written: int) -> Tensor:
    buffer = like.new_zeros((like.shape[0], like.shape[1], rows, like.shape[3]))
    if old is not None and written:
        buffer[:, :, :written].copy_(old[:, :, :written])
        if old.is_cuda:  # it may have been made on another stream
            old.record_stream(torch.cuda.current_stream(old.device))
    return buffer


def _fits(buffer: Tensor | None, heads: Tensor, rows: int) -> bool:
    """Whether these heads can be written there, with a row to spare."""
    if buffer is None or (buffer.dtype, buffer.device) != (heads.dtype, heads.device):
        return False
    b, hkv, capacity, d = buffer.shape
    return (b, hkv, d) == (heads.shape[0], heads.shape[1], heads.shape[3]) and rows < capacity
