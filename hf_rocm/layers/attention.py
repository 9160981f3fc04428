"""The terms on which transformers calls attention, translated into those of `ops.attention`.

`sdpa` is what transformers chooses when nothing is asked for, and it is served here. Whoever asks for anything
else (eager, flash_attention_2, flex_attention, a paged cache) gets exactly that: the stock forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor, nn

from hf_rocm.layers.notes import note
from hf_rocm.ops.padded import Padded, recognise

SERVED = "sdpa"

# Arguments that change what attention computes and that ops.attention has no word for.
_UNSERVED = ("output_attentions", "head_mask", "cache", "position_bias", "softcap", "s_aux", "past_key_value")


class Visibility(TypedDict):
    """The part of `ops.attention`'s arguments that says which keys a query sees."""

    causal: bool
    mask: Tensor | None
    padded: Padded | None


def stays_stock(
    module: nn.Module,
    mask: object,
    arguments: Mapping[str, Any],
    *,
    dropout: float = 0.0,
    further: str | None = None,
) -> str | None:
    """Why this call of an attention layer takes the stock forward, or None.

    mask: what the model passes as attention mask. arguments: the call's further keyword arguments. dropout: the
    probability that would be applied in training. further: a reason that the overlay itself found.
    The reason is kept on the module for `explain`.
    """
    reason = _reason(module, mask, arguments, dropout) or further
    note(module, reason)
    return reason


def _reason(module: nn.Module, mask: object, arguments: Mapping[str, Any], dropout: float) -> str | None:
    config = getattr(module, "config", None)
    implementation = SERVED if config is None else config._attn_implementation
    if implementation != SERVED:
        return f"the attention implementation {implementation!r} was asked for, and only {SERVED!r} is served"
    if module.training and dropout:
        return f"attention dropout ({dropout}) in training is stock's"
    if mask is not None and not isinstance(mask, Tensor):
        return f"the attention mask is a {type(mask).__name__}, not a tensor"
    for name in _UNSERVED:
        value = arguments.get(name)
        if value is not None and value is not False:
            return f"the call has {name}, which stays stock"
    return None


def sees(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Visibility]:
    """The keys and values that count, and which of them each query sees.

    query: [B, H, S_q, D]; key: [B, Hkv, S_k, D]; value: [B, Hkv, S_k, D_v]; mask: as transformers made it for sdpa,
    holding everything (causality, window, padding), or None for a plain causal or a full call.
    Returns (key, value, visibility), key and value perhaps shortened, never expanded.
    """
    if mask is not None:
        padded = recognise(mask, query, key, value)
        return key, value, {"causal": False, "mask": mask, "padded": padded}
    asked = arguments.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    s_q, s_k = query.shape[2], key.shape[2]
    if causal and 1 < s_q < s_k:
        # No mask with more keys than queries: transformers relies on sdpa's top-left alignment to prefill an empty
        # static cache. The keys beyond the queries are the unwritten ones.
        key, value = key[:, :, :s_q], value[:, :, :s_q]
    return key, value, {"causal": causal and s_q > 1, "mask": None, "padded": None}
