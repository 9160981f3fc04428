"""The cache of recorded decode steps: buffers at fixed addresses, with lengths that are known on the host.

It is a transformers `Cache` in every release. While it is empty it behaves like a dynamic cache, so a prompt takes as
long as in stock transformers: attention reads the prompt's own keys, and no mask covers unwritten rows. After the
prompt, a step of up to `longest_step` tokens writes to rows whose indices the device reads from `places`, so its
recording stays valid. Changes that affect a recording (a buffer grows, a window moves) occur on the host between steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_rocm.generation.cache_layer import LONGEST_STEP, Layer, bucket, fits, forget, reorder
from hf_rocm.generation.layer_cache import LayerCache
from hf_rocm.generation.step import Unrecordable
from hf_rocm.layers.cached_attention import Slot
from hf_rocm.ops.bits import bits

# Whether `crop` takes the new length, as in older releases, rather than minus the number of tokens to remove.
_CROPS_TO_A_LENGTH = "tokens_to_remove" not in inspect.signature(DynamicCache.crop).parameters


class DecodeCache(LayerCache):
    """A cache for recorded steps. `layers` has one `Layer` per attention layer.

    capacity: the number of tokens that the buffers have room for at first. limit: the largest number of tokens that
    this call can reach; the buffers grow up to it.
    """

    def __init__(self, windows: Sequence[int | None], *, capacity: int, limit: int) -> None:
        self.windows = tuple(windows)
        self.layers = self.attending = [Layer(window) for window in windows]
        self.target = capacity
        self.limit = limit
        # The number of drafts that may be written with the prompt; None without drafts.
        self.drafts: int | None = None
        # The number of rows after the prompt that are written before a window may move.
        self.ahead = 0
        # The number of earlier calls that this cache has served.
        self.uses = 0
        # The number of tokens that the step writes.
        self.tokens = 1
        # Recorded steps and reorderings, and their recorder; see runner.py.
        self.recordings: dict[Any, Any] = {}
        self.recording = False
        # A weak reference to the runner's method that replays a recorded reordering.
        self.reorderer: Any = None
        # How the call chooses its tokens, and the call's `Runner`; see token_choice.py and runner.py.
        self.choice: Any = None
        self.runner: Any = None
        # How many hooks this process had registered when the call's model was examined; see `decide.refuses_call`.
        self.hooks = 0
        # The `UserCache` that this cache represents, or None.
        self.user: Any = None
        # Whether the prompt may be replayed; see forwards/prompts.py.
        self.replays_prompt = True
        # Whether transformers' loop drops the extra step of the late stop check.
        self._is_user_defined = False
        # The number of tokens that were copied from the user's cache.
        self._loaded = 0
        # Window → its places, and one of its layers.
        self._places: dict[int | None, tuple[Tensor, Layer]] = {}
        # The length for which the places were computed, and the number of tokens.
        self._placed = -1, 1
        # The length at which a buffer must grow or a window must move.
        self._end = 0
        # The length when `_make_room` or `reorder_cache` last ran.
        self._settled = 0
        # Like the next attribute, for transformers' base class.
        self.layer_class_to_replicate = None
        self.offloading = False

    @property
    def capacity(self) -> int:
        """The number of rows of the largest buffer."""
        return max(layer.capacity for layer in self.attending)

    @property
    def encoder_length(self) -> int:
        """The length of the encoder's output; 0 without an encoder."""
        return 0

    def has_room(self, tokens: int = 1) -> bool:
        """Whether this number of further tokens fits without growing a buffer or moving a window."""
        return self.length + tokens <= self._end

    @property
    def longest_step(self) -> int:
        """The largest number of tokens of a step that writes to rows whose indices the device reads."""
        return 1 if self.drafts is None else LONGEST_STEP

    def make_room(self, tokens: int) -> None:
        """Make room for a step's tokens, if they are not placed yet."""
        if self._placed != (self.length, tokens) and not self.recording and not self.has_room(tokens):
            self._make_room(tokens)

    def aim(self, tokens: int = 1) -> None:
        """Make room for a step's tokens, and write their rows' indices to the device, once per step."""
        self.make_room(tokens)
        for places, row in self.places(tokens):
            torch.arange(row, row + len(places), out=places)

    def places(self, tokens: int) -> list[tuple[Tensor, int]]:
        """The tensors to which the caller must write a step's row indices, with the first index; empty if written."""
        if self._placed == (self.length, tokens):
            return []
        if self.recording:
            raise Unrecordable("the step writes to the cache more than once")
        self._placed = self.length, tokens
        self.tokens = tokens
        return [(places, layer.rows) for places, layer in self._places.values()]

    def relative_places(self) -> list[tuple[Tensor, int]]:
        """The tensors that the caller must write, with the difference between a step's first row and its position."""
        self._placed = -1, 1
        return [(places, -layer.base) for places, layer in self._places.values()]

    def reserve(self, length: int) -> None:
        """Make room for a sequence of this length, so that no window moves before its last token is written."""
        self._make_room(length - self.length)

    def advance(self) -> None:
        """Count the tokens of a replayed step, which runs no Python."""
        for layer in self.attending:
            layer.rows += self.tokens

    def rewind(self) -> None:
        """Drop the tokens of the last step, so that it can run again."""
        for layer in self.attending:
            layer.rows -= self.tokens

    def keep_states(self) -> None:
        """Copy the states that `rewind` can't restore by counting rows. This cache has none."""

    def drop_states(self) -> None:
        """Drop the copies that `keep_states` made."""

    @property
    def steady(self) -> int:
        """The number of tokens that have been written since `_make_room` or `reorder_cache` last ran."""
        return self.length - self._settled

    def back(self, steps: int) -> None:
        """Drop the `steps` tokens (at most `steady`) before the current step. Call `aim` again before a step runs."""
        for layer in self.attending:
            layer.rows -= steps

    def load(self, layer_idx: int, keys: Tensor, values: Tensor, *, seen: int) -> None:
        """Copy the last keys [B, Hkv, S, D] and values of a sequence of `seen` tokens to an empty layer."""
        layer = self.layers[layer_idx]
        self._write_prompt(layer, keys, values)
        layer.base = seen - layer.rows

    def stand_for(self, user: Any) -> None:
        """Set the `UserCache` that this cache represents from now on, or None."""
        self.user = user
        self._is_user_defined = user is not None and user.passed
        self._loaded = 0 if user is None else self.length

    def level(self, length: int) -> None:
        """Set every layer to `length` tokens, for example after a step that raised between two layers."""
        for layer in self.attending:
            layer.rows = length - layer.base

    def written(self, tokens: int) -> list[Tensor]:
        """Copy the rows of the last tokens: [B, Hkv, tokens, D], keys and values of every layer."""
        return [
            one[:, :, layer.rows - tokens : layer.rows].clone() for layer in self.attending for one in layer.buffers
        ]

    def digest(self, without: int) -> Tensor:
        """Sum the bits of every layer's keys and values, except the last `without` rows: [2 * layers] int64."""
        written = [one[:, :, : layer.rows - without] for layer in self.attending for one in layer.buffers]
        return torch.stack([bits(rows).sum(dtype=torch.int64) for rows in written])

    def rows_of_beams(self, *, rounded: bool = False) -> list[Tensor]:
        """The written keys and values of every layer, [B, Hkv, S, D]. rounded: round S up."""
        return [
            buffer[:, :, : bucket(layer.rows) if rounded else layer.rows]
            for layer in self.attending
            for buffer in layer.buffers
            if buffer is not None
        ]

    def extents(self) -> tuple[int, ...]:
        """The number of written rows for each window, rounded up, but at most the capacity."""
        return tuple(min(bucket(layer.rows), layer.capacity) for _, layer in self._places.values())

    def step_arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments that the recorded step takes."""
        return arguments

    @property
    def constants(self) -> tuple[object, ...]:
        """The arguments that are at the same address in every step."""
        return (self,)

    def fresh(self) -> DecodeCache:
        """A new cache for the same call, in the state before its first step."""
        cache = type(self)(self.windows, capacity=self.target, limit=self.limit)
        cache.drafts, cache.replays_prompt = self.drafts, False
        if self.user is not None:
            self.user.load(cache)
        return cache

    @contextmanager
    def being_recorded(self) -> Iterator[None]:
        """Within the block, lengths are device tensors, and methods that need the host raise `Unrecordable`."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def _make_room(self, tokens: int) -> None:
        for layer in self.attending:
            if layer.rows + tokens > layer.capacity and layer.window is not None and layer.rows >= layer.window:
                layer.move_window(layer.window)
            if layer.rows + tokens > layer.capacity:
                self._grow(layer, layer.rows + tokens)
            self._set_place(layer)
        self._end = min(layer.base + layer.capacity for layer in self.attending)
        self._placed = -1, 1
        self._settled = self.length

    def _grow(self, layer: Layer, rows: int) -> None:
        self.recordings.clear()
        tokens = max(rows, min(2 * layer.capacity, self.limit))
        layer.allocate(layer.keys, layer.values, max(rows, layer.room(bucket(tokens))))

    def _set_place(self, layer: Layer) -> None:
        place = self._places.get(layer.window)
        if place is None or place[0].device != layer.keys.device:
            with torch.inference_mode(False):
                place = torch.zeros(LONGEST_STEP, dtype=torch.int64, device=layer.keys.device), layer
            self._places[layer.window] = place
        if layer.places is not place[0]:
            layer.places, layer.place = place[0], place[0][:1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a call's keys [B, Hkv, S, D] and values [B, Hkv, S, D_v]. Returns those that attention reads."""
        layer = self.layers[layer_idx]
        count = key_states.shape[2]
        if not layer.rows:
            return self._write_prompt(layer, key_states, value_states)
        if count > self.longest_step or layer.length == self._loaded:
            return self._write_more(layer, key_states, value_states)
        if self._placed != (layer.length, count):
            self.aim(count)
        places = layer.places_of(count)
        layer.keys.index_copy_(2, places, key_states)
        layer.values.index_copy_(2, places, value_states)
        layer.rows += count
        return layer.keys, layer.values

    def _hf_rocm_slot(self, layer_idx: int, key: Tensor, value: Tensor) -> Slot | None:
        """The rows for these keys and values, for kernels that write them; None where `update` must be called."""
        layer, count = self.layers[layer_idx], key.shape[2]
        if not layer.rows:
            return self._rows_of_prompt(layer, key, value)
        if count > self.longest_step or layer.length == self._loaded:
            return None
        if self._placed != (layer.length, count):
            self.aim(count)
        return Slot(layer.keys, layer.values, layer.places_of(count), partial(layer.count, count))

    def _write_prompt(self, layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        count = key.shape[2]
        written = layer.kept(count, self.drafts or 0)
        self._make_room_for_prompt(layer, key, value, written)
        layer.keys[:, :, :written].copy_(key[:, :, count - written :])
        layer.values[:, :, :written].copy_(value[:, :, count - written :])
        layer.base, layer.rows = count - written, written
        return key, value

    def _rows_of_prompt(self, layer: Layer, key: Tensor, value: Tensor) -> Slot | None:
        """The rows for a prompt's keys and values; None if the window of the layer excludes some of them."""
        count = key.shape[2]
        if layer.kept(count, self.drafts or 0) < count:
            return None
        self._make_room_for_prompt(layer, key, value, count)

        def written() -> None:
            layer.base, layer.rows = 0, count

        return Slot(layer.keys[:, :, :count], layer.values[:, :, :count], None, written)

    def _make_room_for_prompt(self, layer: Layer, key: Tensor, value: Tensor, rows: int) -> None:
        needed = rows + self.ahead
        self._end = 0
        if not fits(layer.keys, key, needed) or not fits(layer.values, value, needed):
            self.recordings.clear()
            layer.keys = layer.values = None
            layer.allocate(key, value, max(layer.room(max(self.target, bucket(key.shape[2] + 1))), needed + 1))

    def _write_more(self, layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens and return all keys and values, as a dynamic cache does."""
        if self.recording:
            raise Unrecordable("the step writes more than one token")
        self._placed, self._end = (-1, 1), 0
        count = key.shape[2]
        key = torch.cat((layer.keys[:, :, : layer.rows], key), dim=2)
        value = torch.cat((layer.values[:, :, : layer.rows], value), dim=2)
        total = layer.rows + count
        written = layer.kept(total, 0 if self.drafts is None else count)
        if written > layer.capacity:
            self.recordings.clear()
            layer.allocate(key, value, max(layer.room(bucket(written + 1)), written))
        layer.keys[:, :, :written].copy_(key[:, :, total - written :])
        layer.values[:, :, :written].copy_(value[:, :, total - written :])
        layer.base += total - written
        layer.rows = written
        return key, value

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> Any:
        """The number of tokens seen so far; a device tensor while a step is recorded."""
        layer = self._sized(layer_idx)
        if self.recording:
            if layer.window is not None:
                raise Unrecordable("the step reads the length of a sliding layer")
            return layer.place[0]
        return layer.length

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that attention will receive, and the position of the first one."""
        if self.recording:
            raise Unrecordable("the step creates its masks itself")
        layer = self._sized(layer_idx)
        count = query if isinstance(query, int) else query.shape[0]
        if count <= self.longest_step and layer.length > self._loaded:
            self.aim(count)
            return layer.capacity, layer.base
        return layer.rows + count, layer.base

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return max(self.target, self._sized(layer_idx).capacity)

    def _sized(self, layer_idx: int) -> Layer:
        """The layer with this index. If it does not exist or has no keys: the first layer with keys."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer if isinstance(layer, Layer) else self.attending[0]

    def reset(self) -> None:
        forget(self.attending)
        self._placed = -1, 1
        self._end = 0
        self.drafts, self.ahead, self.uses, self.replays_prompt = None, 0, self.uses + 1, True
        self.stand_for(None)

    def crop(self, tokens: int) -> None:
        """Drop the last `-tokens` tokens: the step that ran before the late stop check, or drafts that were rejected.

        In a call that verifies drafts, tokens > 0 (or 0 if `_CROPS_TO_A_LENGTH`) is the new length; it may be a tensor.
        """
        if self.recording or (tokens > 0 and self.drafts is None):
            raise NotImplementedError("a cache of recorded steps can't be cropped to a length; pass a DynamicCache")
        to_length = tokens > 0 or (tokens == 0 and self.drafts is not None and _CROPS_TO_A_LENGTH)
        forgotten = int(max(0, self.length - tokens) if to_length else -tokens)
        for layer in self.attending:
            layer.rows -= forgotten

    def activate_past_recording(self) -> None:
        """Do nothing: the buffer of a window has more rows than the window, so a few steps can always be dropped."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace every row of the batch with row `beam_idx[row]`, in place, so that recordings stay valid.

        Earlier steps can't be recomputed afterwards, because their rows have moved.
        """
        if self.recording:
            raise Unrecordable("the step reorders the cache")
        recorded = None if self.reorderer is None else self.reorderer()
        reorder(self.rows_of_beams(), beam_idx) if recorded is None else recorded(beam_idx)
        self._settled = self.length

    def batch_repeat_interleave(self, repeats: int) -> None:
        first = self.attending[0].keys
        self.batch_select_indices(torch.arange(len(first), device=first.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.recordings.clear()
        for layer in self.attending:
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys.index_select(0, indices.to(layer.keys.device))
                layer.values = layer.values.index_select(0, indices.to(layer.values.device))

    @property
    def is_compileable(self) -> bool:
        """Whether the next call runs over the static buffers; a prompt uses the masks of a dynamic cache."""
        return self.length > self._loaded
