"""The terms on which transformers calls attention, translated into those of `ops.attention`.

`sdpa` is what transformers chooses when nothing is asked for, and it is served here. Whoever asks for anything
else (eager, flash_attention_2, flex_attention, a paged cache) gets exactly that: the stock forward. Models whose
attention has terms that SDPA lacks (softcap, sinks) are given `eager` by transformers itself, which can't be told from
a request: for those it is served too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hf_rocm.layers.notes import note
from hf_rocm.ops import decode
from hf_rocm.ops.padded import CacheRows, Padded, recognise
from hf_rocm.ops.registry import kernel_serves

SERVED = "sdpa"

_ROWS = "_hf_rocm_rows"  # on a mask: what it says in numbers that stay on the device

# Arguments that change what attention computes and that ops.attention has no word for.
_UNSERVED = (
    "output_attentions",
    "head_mask",
    "layer_head_mask",
    "cache",
    "position_bias",
    "softcap",
    "s_aux",
    "past_key_value",
)


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
    beyond_sdpa: bool = False,
) -> str | None:
    """Why this call of an attention layer takes the stock forward, or None.

    mask: what the model passes as attention mask. arguments: the call's further keyword arguments. dropout: the
    probability that would be applied in training. further: a reason that the overlay itself found. beyond_sdpa: the
    model's attention has terms that SDPA lacks, so that transformers' own choice for it is `eager`.
    The reason is kept on the module for `explain`.
    """
    reason = _reason(module, mask, arguments, dropout, beyond_sdpa) or further
    note(module, reason)
    return reason


def _reason(
    module: nn.Module, mask: object, arguments: Mapping[str, Any], dropout: float, beyond_sdpa: bool
) -> str | None:
    config = getattr(module, "config", None)
    implementation = SERVED if config is None else _implementation(config)
    if beyond_sdpa and implementation == "eager":
        if getattr(config, "output_attentions", False):
            return "the config asks for attention weights, which stay stock"
    elif implementation != SERVED:
        return f"the attention implementation {implementation!r} was asked for, and only {SERVED!r} is served"
    if module.training and dropout:
        return f"attention dropout ({dropout}) in training is stock's"
    if mask is not None and not isinstance(mask, Tensor):
        return f"the attention mask is a {type(mask).__name__}, not a tensor"
    for name in arguments:
        if name in _UNSERVED and (value := arguments[name]) is not None and value is not False:
            what = "a cache in pages (continuous batching)" if name == "cache" else name
            return f"the call has {what}, which stays stock"
    return None


def _implementation(config: Any) -> object:
    """`config._attn_implementation`, without the 2 µs of a property behind transformers' `__getattribute__`."""
    if not is_compiling():
        try:
            found: object = object.__getattribute__(config, "_attn_implementation_internal")
        except AttributeError:
            found = None
        if found is not None:
            return found
    return config._attn_implementation


def sees(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    arguments: Mapping[str, Any],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Visibility]:
    """The keys and values that count, and which of them each query sees.

    query: [B, H, S_q, D]; key: [B, Hkv, S_k, D]; value: [B, Hkv, S_k, D_v]; mask: as transformers made it, holding
    everything (causality, window, padding), or None for a plain causal or a full call. window: the layer's sliding
    window; softcap, sinks: what `ops.attention` will be given. All three only help to find a kernel that takes what the
    mask says.
    Returns (key, value, visibility), key and value perhaps shortened, never expanded.
    """
    if mask is not None:
        terms = {"softcap": softcap is not None, "sinks": sinks is not None}
        rows: CacheRows | None = getattr(mask, _ROWS, None)
        padded: Padded | None
        if rows is None or mask.shape[2:] != (query.shape[2], key.shape[2]):
            padded = recognise(mask, query, key, value, window=window, **terms)
        else:  # it changes with every step, and nobody has to read it
            padded = rows if _kernel_takes(rows, query, key, value, **terms) else None
        return key, value, {"causal": False, "mask": mask, "padded": padded}
    asked = arguments.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    s_q, s_k = query.shape[2], key.shape[2]
    if causal and s_q > 1:
        config = getattr(module, "config", None)
        # stock's eager attention knows no causality but the mask's
        causal = config is None or config._attn_implementation != "eager"
    if causal and 1 < s_q < s_k:
        # No mask with more keys than queries: transformers relies on sdpa's top-left alignment to prefill an empty
        # static cache. The keys beyond the queries are the unwritten ones.
        key, value = key[:, :, :s_q], value[:, :, :s_q]
    return key, value, {"causal": causal and s_q > 1, "mask": None, "padded": None}


def attach(mask: Tensor, rows: CacheRows) -> Tensor:
    """Say in numbers what a mask says, for the kernels that need none. Returns the mask, which must outlive no change.

    mask: [B, 1, S_q, S_k]; rows: the keys that its last S_q queries see. Whoever changes the one changes the other.
    """
    setattr(mask, _ROWS, rows)
    return mask


def _kernel_takes(rows: CacheRows, query: Tensor, key: Tensor, value: Tensor, *, softcap: bool, sinks: bool) -> bool:
    """Whether lengths lead to a kernel; PyTorch takes the mask that is there already."""
    if is_compiling():
        return False  # what hangs on a tensor is no part of the graph
    spec = decode.DecodeSpec(
        dtype=query.dtype,
        device=query.device,
        heads=query.shape[1],
        kv_heads=value.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        softcap=softcap,
        sinks=sinks,
        grad=torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        one_query=query.shape[2] == 1,
        few_queries=query.shape[2] <= decode.FEW_QUERIES,
        starts=rows.key_starts is not None,
        window=rows.window,
    )
    return kernel_serves(decode._operation, tuple(spec))
