"""Recognise a padded batch from its mask, and convert it to a form for kernels without masks.

transformers passes a [B, 1, S_q, S_k] mask to attention for every purpose. Packed sequences or lengths can replace a
mask that expresses only left padding with causality and a sliding window, keys that no query attends to, or the filled
part of a static cache. The mask is compared element by element, once, and only if a kernel can use the result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm.ops import decode, varlen
from hf_rocm.ops.attention import mask_serves
from hf_rocm.ops.attention_eager import visible
from hf_rocm.ops.captured import captured
from hf_rocm.ops.padded import CacheRows as CacheRows
from hf_rocm.ops.padded import Packed
from hf_rocm.ops.padded import Padded as Padded
from hf_rocm.ops.specs.attention import FEW_QUERIES, VarlenSpec

# Attribute of the mask: ((its version, S_k, window), the result).
_RECOGNISED = "_hf_rocm_padded"


def recognise(
    mask: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    softcap: bool = False,
    sinks: bool = False,
) -> Padded | None:
    """A padded batch that can replace this mask, or None if the mask must be used.

    mask: [B | 1, 1, S_q, ≥ S_k], bool or additive; query: [B, H, S_q, D]; key: [B, Hkv, S_k, D]; value:
    [B, Hkv, S_k, D_v]. window: the sliding window that the mask may include. softcap, sinks: whether the call uses
    them. Reads the mask on the host once for all layers, and never while compiling or capturing a graph.
    """
    s_q, s_k = query.shape[2], key.shape[2]
    if is_compiling() or mask.shape[1:3] != (1, s_q) or s_q > s_k:
        return None
    if window is not None and window >= s_k:
        # Such a window hides no key.
        window = None
    if mask.is_inference() or not _kernel_serves(query, key, value, mask, window, softcap, sinks):
        # Inference tensors have no version, so the mask would have to be read in every layer.
        return None
    if captured(query):
        return None
    state = (mask._version, s_k, window)
    earlier = getattr(mask, _RECOGNISED, None)
    if earlier is not None and earlier[0] == state:
        padded: Padded | None = earlier[1]
        return padded
    seen = _as_bool(mask[:, 0, :, :s_k])
    if seen is None:
        padded = None
    else:
        seen = seen.expand(query.shape[0], s_q, s_k)
        padded = _filled(seen[:, 0]) if s_q == 1 else _packed(seen, window)
    setattr(mask, _RECOGNISED, (state, padded))
    return padded


def _filled(real: Tensor) -> CacheRows | None:
    """The lengths of rows whose keys are filled from the front, for single queries, or None. real: [B, S_k]."""
    lengths = real.sum(-1)
    places = torch.arange(real.shape[1], device=real.device)
    if bool((real == (places < lengths[:, None])).all() & (lengths > 0).all()):
        return CacheRows(lengths, key_ends=_ends(lengths))
    return None


def _packed(seen: Tensor, window: int | None) -> Packed | None:
    """Packed sequences for left padding with causality and a window, or for keys that no query attends to; or None.

    seen: [B, S_q, S_k].
    """
    b, s_q, s_k = seen.shape
    # The keys that at least one query attends to.
    real = seen.any(1)
    own = real[:, s_k - s_q :]
    if not bool(real.any(-1).all()):
        return None
    if bool((seen == real[:, None]).all()):
        return _make(real, torch.ones(b, s_q, dtype=torch.bool, device=seen.device), causal=False)
    causal = visible(s_q, s_k, causal=True, window=window, device=seen.device)
    assert causal is not None
    # packing would lose the defined result of a padding query that attends to a key, so right padding uses the mask
    packable = own | ~seen.any(-1)
    if bool((seen == (real[:, None] & causal)).all() & packable.all()):
        return _make(real, own, causal=True, window=window)
    return None


def _as_bool(mask: Tensor) -> Tensor | None:
    """True where a query attends to a key; None if the mask has values other than 0 and very large negative ones."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()) else None


def _make(real: Tensor, own: Tensor, *, causal: bool, window: int | None = None) -> Packed:
    queries, keys = own.sum(-1), real.sum(-1)
    return Packed(
        key_ends=_ends(keys),
        query_ends=_ends(queries),
        queries=own.flatten().nonzero()[:, 0],
        keys=real.flatten().nonzero()[:, 0],
        longest_query=int(queries.max()),
        longest_key=int(keys.max()),
        causal=causal,
        window=window,
    )


def _ends(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _kernel_serves(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, window: int | None, softcap: bool, sinks: bool
) -> bool:
    """Whether a kernel serves packed sequences or lengths and, for few queries, none serves the mask itself."""
    s_q = query.shape[2]
    if s_q <= FEW_QUERIES and mask_serves(query, key, value, mask.dtype, softcap=softcap, sinks=sinks):
        return False
    if s_q == 1:
        return decode.kernel_serves(query, key, value, softcap=softcap, sinks=sinks)
    if sinks:
        return False
    common = (query.dtype, query.device, query.shape[1], value.shape[1], query.shape[3], value.shape[3])
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return all(
        packing_serves(packed_specification(*common, causal=causal, window=hidden, softcap=softcap, grad=grad))
        for causal, hidden in ((True, window), (False, None))
    )


def packed_specification(
    dtype: torch.dtype,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    *,
    causal: bool,
    window: int | None = None,
    softcap: bool = False,
    grad: bool = False,
) -> VarlenSpec:
    """The specification of a padded batch once it is packed; calls with sinks are not packed."""
    return VarlenSpec(
        dtype=dtype,
        device=device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=False,
        grad=grad,
    )


def packing_serves(spec: VarlenSpec) -> bool:
    """Whether a kernel serves packed sequences here; otherwise the mask itself is used."""
    return varlen.kernel_serves(spec)
