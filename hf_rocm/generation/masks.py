"""The masks of decode steps: resident tensors that are updated in place instead of being built for every step.

In a step of a few tokens, the first and the last key that each token sees determine the mask. So there is one resident
tensor per kind of layer. Every layer reads it as an ordinary mask, and the device updates it as the length grows. The
same bounds are attached to the mask as lengths and starts (`CacheRows`), for kernels that need no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.generation.static_buffers import settle
from hf_rocm.layers.attention import attach
from hf_rocm.ops.decode import seen_keys
from hf_rocm.ops.mask_patterns import CacheRows


class Unlike(Exception):
    """Raised if transformers must prepare a step. The message is the reason, as a sentence."""


class Kind(NamedTuple):
    """The layers that share a mask: their type in the config, their window, and the index of the first one."""

    name: str | None  # None: all layers share one mask
    window: int | None
    layer: int


def kinds_of(config: Any, masks: Any, cache: Any) -> list[Kind]:
    """The kinds of layers that use these masks. masks: one mask, or a dict with None where no mask is needed.

    Raises `Unlike` if the attention is not causal, if the model creates its own masks, or if a mask is neither causal
    nor causal with a sliding window.
    """
    from transformers import masking_utils

    text = config.get_text_config()
    if not getattr(text, "is_causal", True):
        raise Unlike("the model's attention is not causal")
    causal, sliding = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    if not isinstance(masks, dict):
        if hasattr(text, "layer_types") or getattr(text, "attention_chunk_size", None) is not None:
            raise Unlike("the model creates its own masks")
        window = getattr(text, "sliding_window", None)
        return [Kind(None, window, _first(cache, window is not None))]
    kinds = []
    for name, mask in masks.items():
        if mask is None:
            continue
        maker = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(name)
        if name not in text.layer_types or (maker is not causal and maker is not sliding):
            raise Unlike(f"its layers of type {name} use masks other than causal and sliding-window masks")
        kinds.append(Kind(name, text.sliding_window if maker is sliding else None, _first(cache, maker is sliding)))
    return kinds


def _first(cache: Any, sliding: bool) -> int:
    """The index of the layer whose sizes determine the size of the mask."""
    flags = list(getattr(cache, "is_sliding", []))
    return flags.index(sliding) if sliding in flags else 0


class StepMask:
    """The mask of one kind of layer. tensor: the resident mask, [B, 1, S_q, L].

    like: a tensor of the same shape and dtype, bool or additive. lengths: [S_q], for every token of the step, the
    number of keys per row up to and including this token. starts: [B], the index of every row's first key that is not
    padding, or None. The caller updates both in place. rolls: whether a full buffer drops its first key for every new
    one, so that lengths exceed the buffer's size; S_q is 1 in that case.
    """

    def __init__(
        self, like: Tensor, window: int | None, lengths: Tensor, starts: Tensor | None, *, rolls: bool
    ) -> None:
        size = like.shape[3]
        self.rows = CacheRows(lengths[-1:], starts, window if window is not None and window < size else None)
        self._ends = lengths[:, None]
        self._places = torch.arange(size, device=like.device).expand(like.shape)
        self._seen = torch.empty(like.shape, dtype=torch.bool, device=like.device)
        self._real = None if starts is None or rolls else torch.empty_like(self._seen)
        self.tensor, self._values = self._seen, None
        if like.dtype != torch.bool:
            self.tensor = torch.empty_like(self._seen, dtype=like.dtype)
            self._values = like.new_zeros(()), like.new_full((), torch.finfo(like.dtype).min)
        attach(settle(self.tensor), self.rows)

    def rebase(self) -> None:
        """Update the mask for new starts."""
        if self._real is not None and self.rows.key_starts is not None:
            torch.ge(self._places, self.rows.key_starts[:, None, None, None], out=self._real)
        self.refresh()

    def refresh(self) -> None:
        """Update the tensor from lengths, starts and window."""
        lengths, starts, window = self.rows.key_lengths, self.rows.key_starts, self.rows.window
        if starts is not None and self._real is None:
            self._seen.copy_(seen_keys(1, self._seen.shape[3], lengths, starts, window))
        else:
            torch.lt(self._places, self._ends, out=self._seen)
            if self._real is not None:
                self._seen.logical_and_(self._real)
            if window is not None:
                self._seen.logical_and_(self._places >= self._ends - window)
        if self._values is not None:
            torch.where(self._seen, *self._values, out=self.tensor)
