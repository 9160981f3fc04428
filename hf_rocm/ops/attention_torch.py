"""Attention through PyTorch's scaled_dot_product_attention, without expanding keys or values.

SDPA aligns causality top-left and takes grouped heads only without a mask, so both are brought into its terms here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm.ops.attention_eager import visible

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.attention import AttentionSpec

# Up to this many queries the group's rows are stacked under one key head with a stacked mask; beyond it the mask
# would cost more than it saves, and each query head of the group runs against the shared key heads by itself.
STACKED_QUERIES = 16


def refuses(spec: AttentionSpec, device: Device) -> str | None:
    if spec.weights:
        return "SDPA does not return attention weights"
    if spec.softcap:
        return "SDPA has no softcap"
    if spec.sinks:
        return "SDPA has no sinks"
    return None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`; softcap and sinks are always None here."""
    _, heads, s_q, _ = query.shape
    _, kv_heads, s_k, _ = key.shape
    if causal and s_q > s_k:
        return _after_the_blind(query, key, value, mask, scale=scale, window=window), None
    causal = causal and s_q > 1
    if causal or window is not None or mask is not None:
        mask = _combined(mask, query, s_k, causal=causal, window=window)
    groups = heads // kv_heads
    if mask is None or groups == 1:
        output = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=groups > 1
        ).transpose(1, 2)
    elif s_q <= STACKED_QUERIES:
        output = _stacked(query, key, value, mask, scale)
    else:
        output = _head_by_head(query, key, value, mask, scale)
    return output.contiguous(), None


def _after_the_blind(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, window: int | None
) -> Tensor:
    """Causal with more queries than keys: the first S_q − S_k see nothing and are zero, the rest are a square call.

    SDPA's GPU kernels give such rows a mean of values instead. Returns [B, S_q, H, D_v].
    """
    blind = query.shape[2] - key.shape[2]
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, blind:]
    output, _ = attention(
        query[:, :, blind:], key, value, scale=scale, causal=True, mask=mask, window=window, softcap=None, sinks=None
    )
    return F.pad(output, (0, 0, 0, 0, blind, 0))


def _combined(mask: Tensor | None, query: Tensor, s_k: int, *, causal: bool, window: int | None) -> Tensor | None:
    """The mask that SDPA needs besides `is_causal`: none for a square causal call, else everything in one."""
    s_q = query.shape[2]
    if mask is not None:
        if is_compiling() or mask.shape[-1] != s_k:
            mask = mask[..., :s_k]
    elif causal and s_q == s_k and window is None:
        return None
    seen = visible(s_q, s_k, causal=causal, window=window, device=query.device)
    if seen is None:
        return mask
    if mask is None:
        return seen.view(1, 1, s_q, s_k)
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, -torch.inf)


def _stacked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[B, H, S_q, D] as [B, Hkv, G·S_q, D], with the mask's rows repeated alike. Returns [B, S_q, H, D_v]."""
    b, h, s_q, d = query.shape
    kv_heads, s_k = key.shape[1], key.shape[2]
    groups = h // kv_heads
    if mask.shape[1] == 1:
        rows = mask.unsqueeze(2).expand(-1, -1, groups, s_q, s_k).reshape(mask.shape[0], 1, groups * s_q, s_k)
    else:
        rows = mask.expand(-1, h, s_q, s_k).reshape(mask.shape[0], kv_heads, groups * s_q, s_k)
    output = F.scaled_dot_product_attention(query.reshape(b, kv_heads, groups * s_q, d), key, value, rows, scale=scale)
    # GPU kernels return other strides than CPU ones, so heads and groups may only meet in the copy
    return output.unflatten(2, (groups, s_q)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _head_by_head(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One SDPA call for each member of the group, all key heads at once. Returns [B, S_q, H, D_v]."""
    h = query.shape[1]
    groups = h // key.shape[1]
    members = query.unflatten(1, (-1, groups))  # [B, Hkv, G, S_q, D]
    masks = mask.unflatten(1, (-1, groups)) if mask.shape[1] == h else mask.unsqueeze(2)
    outputs = [
        F.scaled_dot_product_attention(
            members[:, :, member], key, value, masks[:, :, member if masks.shape[2] > 1 else 0], scale=scale
        ).transpose(1, 2)
        for member in range(groups)
    ]
    return torch.stack(outputs, dim=3).flatten(2, 3)
