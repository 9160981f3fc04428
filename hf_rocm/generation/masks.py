"""The masks of decode steps: resident tensors that are updated in place instead of being built for every step.

In a step of a few tokens, the first and the last key that each token attends to determine the mask. So there is one
resident tensor per kind of layer. Every layer reads it as an ordinary mask, and the device updates it as the length
grows. The same bounds are attached to the mask as lengths and starts (`CacheRows`), for kernels that need no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.generation.static_buffers import settle
from hf_rocm.layers.attention import attach
from hf_rocm.ops.mask_patterns import CacheRows


class UnsupportedStep(Exception):
    """Raised if transformers must prepare a step. The message is the reason, as a sentence."""


class Kind(NamedTuple):
    """The layers that share a mask: their type in the config, their window, and the index of the first one."""

    # None: all layers share one mask.
    name: str | None
    window: int | None
    layer: int


def kinds_of(config: Any, masks: Any, cache: Any) -> list[Kind]:
    """The kinds of layers that use these masks. masks: one mask, or a dict with None where no mask is needed.

    Raises `UnsupportedStep` if the attention is not causal, if the model creates its own masks, if a mask is neither
    causal nor causal with a sliding window, or if there are more than two kinds.
    """
    from transformers import masking_utils

    text = config.get_text_config()
    if not getattr(text, "is_causal", True):
        raise UnsupportedStep("the model's attention is not causal")
    causal, sliding = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    if not isinstance(masks, dict):
        if hasattr(text, "layer_types") or getattr(text, "attention_chunk_size", None) is not None:
            raise UnsupportedStep("the model creates its own masks")
        window = getattr(text, "sliding_window", None)
        return [Kind(None, window, _first(cache, window is not None))]
    kinds = []
    for name, mask in masks.items():
        if mask is None:
            continue
        maker = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(name)
        if name not in text.layer_types or (maker is not causal and maker is not sliding):
            raise UnsupportedStep(f"its layers of type {name} use masks other than causal and sliding-window masks")
        kinds.append(Kind(name, text.sliding_window if maker is sliding else None, _first(cache, maker is sliding)))
    if len(kinds) > 2:
        raise UnsupportedStep("it has more than two kinds of layers")
    return kinds


def _first(cache: Any, sliding: bool) -> int:
    """The index of the layer whose sizes determine the size of the mask."""
    flags = list(getattr(cache, "is_sliding", []))
    return flags.index(sliding) if sliding in flags else 0


class StepMask:
    """The mask of one kind of layer. tensor: the resident mask, [B, 1, S_q, L].

    lengths: [S_q], for every token of the step, the number of keys per row up to and including this token. starts: [B],
    the index of every row's first key that is not padding, or None. hidden: in an additive mask, the value for
    masked keys; None if the mask is bool. written: the tensor that `begin_step` writes to: `tensor`, or a
    view of it as uint8 if the mask is bool.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, window: int | None, lengths: Tensor, starts: Tensor | None
    ) -> None:
        size = shape[3]
        self.rows = CacheRows(lengths[-1:], starts, window if window is not None and window < size else None)
        self.hidden = None if dtype == torch.bool else torch.finfo(dtype).min
        self.tensor = attach(settle(torch.empty(shape, dtype=dtype, device=lengths.device)), self.rows)
        self.written = self.tensor.view(torch.uint8) if self.hidden is None else self.tensor
