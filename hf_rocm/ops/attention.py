"""attention: softmax(q kᵀ · scale) v with grouped key/value heads, which are never expanded.

All tiers use the same definition. Causality and the window are aligned bottom-right: query i of S_q is at position
S_k − S_q + i. The output of a query before the first key is zero. If the mask alone hides every key from a query, as
for a padding token, the output is finite but undefined: it is zero in the eager tier, and whatever SDPA returns in the
torch tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, compiler

from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import attention_eager
from hf_rocm.ops.aiter import attention as aiter
from hf_rocm.ops.aiter import triton, varlen
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.attention_eager import visible
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, LONG, Draw, small_window
from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.attention import FEW_QUERIES, Attends, AttentionSpec, AttentionTerms
from hf_rocm.ops.triton import decode as split
from hf_rocm.ops.triton import flash
from hf_rocm.ops.triton.detect import checked as checked_triton

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.device import Device

# Up to this many queries, the query heads of a group are stacked into one call with a stacked mask. With more, stacking
# the mask would cost more than it saves, so there is one call per query head of the group, with the shared key heads.
STACKED_QUERIES = 16


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padded: Attends | None = None,
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention over grouped heads.

    query: [B, H, S_q, D]; key: [B, Hkv, S_k, D]; value: [B, Hkv, S_k, D_v]; H a multiple of Hkv.
    mask: [B | 1, H | 1, S_q | 1, 1 | ≥ S_k], bool (True = visible) or additive in query's dtype; columns beyond S_k
    are ignored. window: how many keys a query attends to, including its own. softcap: c · tanh(score / c). sinks: [H]
    logits that take part in the softmax but have no value. Mask, causality and window are combined. padded: the result
    of `recognise` for the mask, the `CacheRows` that are attached to the mask, or a paged cache; it replaces the mask,
    causality and the window, and is ignored if `weights`.
    weights: whether the attention weights are needed; only the eager tier computes them.
    Returns ([B, S_q, H, D_v] contiguous, weights [B, H, S_q, S_k]). The second value may be None unless `weights`.
    """
    if padded is not None and not weights:
        return padded.attend(query, key, value, scale=scale, softcap=softcap, sinks=sinks), None
    spec = _specification(
        query,
        key,
        value,
        causal,
        window,
        softcap is not None,
        sinks is not None,
        None if mask is None else mask.dtype,
        weights,
    )
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: tuple[Tensor, Tensor | None] = serve(
        query, key, value, scale=scale, causal=causal, mask=mask, window=window, softcap=softcap, sinks=sinks
    )
    return result


def mask_serves(query: Tensor, key: Tensor, value: Tensor, mask: torch.dtype, *, softcap: bool, sinks: bool) -> bool:
    """Whether a kernel serves this call with a mask of this dtype that includes causality and the window."""
    spec = _specification(query, key, value, False, None, softcap, sinks, mask, False)
    return kernel_serves(_operation, spec)


def user_serves(query: Tensor, key: Tensor, value: Tensor, mask: torch.dtype, *, softcap: bool, sinks: bool) -> bool:
    """Like `mask_serves`, but only for implementations that the user registered."""
    if all(candidate.tier != "user" for candidate in _operation.implementations):
        return False
    spec = _specification(query, key, value, False, None, softcap, sinks, mask, False)
    try:
        return _operation.choose(spec).implementation.tier == "user"
    except TierUnavailable:
        return False


def _specification(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    softcap: bool,
    sinks: bool,
    mask: torch.dtype | None,
    weights: bool,
) -> tuple[object, ...]:
    """The fields of an `AttentionSpec`, as a plain tuple with which the implementation is selected."""
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    dtype, device = query.dtype, query.device
    _, heads, s_q, head_dim = query.shape
    _, kv_heads, s_k, value_dim = value.shape
    one_query, square, more_queries = s_q == 1, s_q == s_k, s_q > s_k
    few_queries = 1 < s_q <= FEW_QUERIES and s_q < s_k
    return (
        dtype,
        device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        one_query,
        square,
        more_queries,
        causal,
        window,
        softcap,
        sinks,
        mask,
        grad,
        weights,
        few_queries,
    )


def torch_refuses(spec: AttentionSpec, device: Device) -> str | None:
    if spec.weights:
        return "SDPA does not return attention weights"
    if spec.softcap:
        return "SDPA has no softcap"
    if spec.sinks:
        return "SDPA has no sinks"
    return None


def torch_attention(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """`attention` through scaled_dot_product_attention, without expanding keys or values; no softcap, no sinks.

    SDPA aligns causality top-left, so it is converted to a mask if necessary. With a mask, SDPA on a GPU would expand
    grouped heads, so such calls are stacked by group, or divided into one call per member of a group.
    """
    scale, causal, mask, window = terms["scale"], terms["causal"], terms["mask"], terms["window"]
    _, heads, s_q, _ = query.shape
    _, kv_heads, s_k, _ = key.shape
    if causal and s_q > s_k:
        return _after_masked_rows(query, key, value, terms), None
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


def _after_masked_rows(query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms) -> Tensor:
    """Causal attention with S_q > S_k: the first S_q − S_k rows are zero, and a square call computes the others.

    For rows without a visible key, SDPA's GPU kernels would return a mean of the values. Returns [B, S_q, H, D_v].
    """
    masked = query.shape[2] - key.shape[2]
    mask = terms["mask"]
    if mask is not None and mask.shape[2] > 1:
        terms = {**terms, "mask": mask[:, :, masked:]}
    output, _ = torch_attention(query[:, :, masked:], key, value, **terms)
    return F.pad(output, (0, 0, 0, 0, masked, 0))


def _combined(mask: Tensor | None, query: Tensor, s_k: int, *, causal: bool, window: int | None) -> Tensor | None:
    """The mask for SDPA, which includes causality and the window. None if SDPA needs no mask, or only `is_causal`."""
    s_q = query.shape[2]
    if mask is not None:
        if compiling() or compiler._is_compiling_flag or mask.shape[-1] != s_k:
            mask = mask[..., :s_k]
    elif causal and s_q == s_k and window is None:
        return None
    if not causal and window is None:
        return mask
    seen = visible(s_q, s_k, causal=causal, window=window, device=query.device)
    assert seen is not None
    if mask is None:
        return seen.view(1, 1, s_q, s_k)
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, -torch.inf)


def _stacked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with queries and mask stacked by group: queries [B, Hkv, G·S_q, D]. Returns [B, S_q, H, D_v]."""
    b, h, s_q, d = query.shape
    kv_heads, s_k = key.shape[1], key.shape[2]
    groups = h // kv_heads
    if mask.shape[1] == 1:
        rows = mask.unsqueeze(2).expand(-1, -1, groups, s_q, s_k).reshape(mask.shape[0], 1, groups * s_q, s_k)
    else:
        rows = mask.expand(-1, h, s_q, s_k).reshape(mask.shape[0], kv_heads, groups * s_q, s_k)
    output = F.scaled_dot_product_attention(query.reshape(b, kv_heads, groups * s_q, d), key, value, rows, scale=scale)
    # the outputs of GPU and CPU kernels differ in their strides, so heads and groups are merged in the copy
    return output.unflatten(2, (groups, s_q)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _head_by_head(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One SDPA call per member of the group, for all key heads at once. Returns [B, S_q, H, D_v]."""
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


def _cases(spec: AttentionSpec) -> Iterator[Case]:
    for length in (LENGTH, LONG):
        if spec.one_query:
            s_q, s_k = 1, 1 if spec.square else length
        elif spec.square:
            s_q = s_k = length
        elif spec.more_queries:
            s_q, s_k = length, length - 8
        else:
            s_q, s_k = 5 if spec.few_queries else length - 8, length
        draw = Draw(spec.dtype, spec.device)
        # queries with the strides of a projection's output, keys and values with the strides of a cache
        query = draw(2, s_q, spec.heads, spec.head_dim).transpose(1, 2)
        key, value = draw(2, spec.kv_heads, s_k, spec.head_dim), draw(2, spec.kv_heads, s_k, spec.value_dim)
        mask = None
        if spec.mask is not None:
            mask = torch.ones(2, 1, s_q, s_k, dtype=torch.bool, device=spec.device)
            mask[1, :, :, :3] = False
            if spec.mask != torch.bool:
                mask = torch.zeros(mask.shape, dtype=spec.mask, device=spec.device).masked_fill(~mask, -torch.inf)
        terms = AttentionTerms(
            scale=spec.head_dim**-0.5,
            causal=spec.causal,
            mask=mask,
            window=spec.window,
            softcap=2.0 if spec.softcap else None,
            sinks=draw(spec.heads) if spec.sinks else None,
        )
        yield Case((query, key, value), keywords=terms)


_operation = Operation("attention", AttentionSpec, _cases, small_window, recorded=(0, 1, 2))
for _name, _refuses, _call in (
    ("flash_attn_func", aiter.flash_attn_func_refuses, aiter.flash_attn_func),
    ("mha_fwd", aiter.mha_fwd_refuses, aiter.mha_fwd),
    ("flash_attn_varlen_func", varlen.dense_refuses, varlen.dense),
    ("triton flash_attn_func", triton.refuses, triton.attention),
    ("mha_fwd, sinks by lse", aiter.mha_fwd_lse_refuses, aiter.mha_fwd_lse),
):
    _operation.register(Implementation("aiter", _name, _refuses, _call, checked("attention", _name)))
_operation.register(
    Implementation(
        "triton",
        "decode_kernel",
        split.attention_refuses,
        split.attention,
        checked_triton("attention", "decode_kernel"),
    )
)
_operation.register(
    Implementation(
        "triton",
        "flash_kernel",
        flash.attention_refuses,
        flash.attention,
        checked_triton("attention", "flash_kernel"),
    )
)
_operation.register(Implementation("torch", "SDPA", torch_refuses, torch_attention))
_operation.register(Implementation("eager", "softmax", refuses_nothing, attention_eager.attention))
