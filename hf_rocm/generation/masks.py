"""The masks of decode steps, kept and advanced in place instead of made anew.

In a step of one token a mask says no more than from where to where each row's keys count. So one tensor is kept for
each kind of layers, an ordinary one that every layer understands, and refreshed on the device as the step's length
grows there; what it says in numbers (`CacheRows`) is attached for the kernels that need no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.generation.resident import settle
from hf_rocm.layers.attention import attach
from hf_rocm.ops.decode import seen_keys
from hf_rocm.ops.padded import CacheRows


class Unlike(Exception):
    """Why a step is left to transformers; the message is a sentence."""


class Kind(NamedTuple):
    """The layers that share a mask: what the model calls them, their window, and the first of them."""

    name: str | None  # None: the model has one mask for all layers
    window: int | None
    layer: int


def kinds_of(config: Any, masks: Any, cache: Any) -> list[Kind]:
    """The kinds of layers that transformers made these masks for: one mask, or a dict with None where none is needed.

    Raises `Unlike` on a mask that is neither causal nor causal with a sliding window.
    """
    from transformers import masking_utils

    text = config.get_text_config()
    if not getattr(text, "is_causal", True):
        raise Unlike("the model's attention is not causal")
    causal, sliding = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    if not isinstance(masks, dict):
        if hasattr(text, "layer_types") or getattr(text, "attention_chunk_size", None) is not None:
            raise Unlike("the model makes masks of its own")
        window = getattr(text, "sliding_window", None)
        return [Kind(None, window, _first(cache, window is not None))]
    found = []
    for name, mask in masks.items():
        if mask is None:
            continue
        maker = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(name)
        if name not in text.layer_types or (maker is not causal and maker is not sliding):
            raise Unlike(f"its layers of {name} have masks of their own")
        found.append(Kind(name, text.sliding_window if maker is sliding else None, _first(cache, maker is sliding)))
    return found


def _first(cache: Any, sliding: bool) -> int:
    """The layer whose sizes transformers makes the mask for."""
    which = list(getattr(cache, "is_sliding", []))
    return which.index(sliding) if sliding in which else 0


class StepMask:
    """The mask of one kind of layers: `tensor` is what they get, [B, 1, 1, L], resident.

    like: transformers' own mask, bool or additive. lengths: [1], how many keys every row has had in its buffer, that of
    the step's token included; starts: [B], the first that counts, or None. Both are advanced by their owner. rolls:
    whether a full buffer drops its first key for each new one, so that lengths go beyond it.
    """

    def __init__(
        self, like: Tensor, window: int | None, lengths: Tensor, starts: Tensor | None, *, rolls: bool
    ) -> None:
        size = like.shape[3]
        self.rows = CacheRows(lengths, starts, window if window is not None and window < size else None)
        self._places = torch.arange(size, device=like.device).expand(like.shape)
        self._seen = torch.empty(like.shape, dtype=torch.bool, device=like.device)
        self._real = None if starts is None or rolls else torch.empty_like(self._seen)
        self.tensor, self._values = self._seen, None
        if like.dtype != torch.bool:
            self.tensor = torch.empty_like(self._seen, dtype=like.dtype)
            self._values = like.new_zeros(()), like.new_full((), torch.finfo(like.dtype).min)
        attach(settle(self.tensor), self.rows)

    def rebase(self) -> None:
        """Take up new starts."""
        if self._real is not None and self.rows.key_starts is not None:
            torch.ge(self._places, self.rows.key_starts[:, None, None, None], out=self._real)
        self.refresh()

    def refresh(self) -> None:
        """Bring the tensor to what the numbers say."""
        lengths, starts, window = self.rows.key_lengths, self.rows.key_starts, self.rows.window
        if starts is not None and self._real is None:
            self._seen.copy_(seen_keys(1, self._seen.shape[3], lengths, starts, window))
        else:
            torch.lt(self._places, lengths, out=self._seen)
            if self._real is not None:
                self._seen.logical_and_(self._real)
            if window is not None:
                self._seen.logical_and_(self._places >= lengths - window)
        if self._values is not None:
            torch.where(self._seen, *self._values, out=self.tensor)
