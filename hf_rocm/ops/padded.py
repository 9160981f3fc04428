"""A padded batch, recognised in its mask and brought into a form that kernels without masks can use.

transformers hands attention a [B, 1, S_q, S_k] mask whatever the reason for it. Where that mask is nothing but left
padding under causality and a sliding window, keys hidden from everybody, or the filled part of a static cache, packed
sequences or lengths say the same. It is compared element by element, once for each mask, and only where a kernel would
take it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm.ops import decode, varlen
from hf_rocm.ops.attention_eager import visible
from hf_rocm.ops.registry import kernel_serves

_KEPT = "_hf_rocm_padded"  # on the mask itself: (its version, S_k, what was recognised)


@dataclass(frozen=True, eq=False)
class CacheRows:
    """The written keys of a cache, by numbers that stay on the device: the terms of `decode_attention`.

    For the last few queries of each row, S_q of them, causal among themselves. key_lengths: [B], or [1] for all rows
    alike, int32 or int64: how many keys the row has had, left padding and those of this call's queries included.
    key_starts: [B], or None where nothing is padded: how many padding keys come first. Both count from the row's very
    first token, whatever the cache has dropped since, so that one pair serves every layer: where key_lengths exceeds
    the keys that attention is given, these are a rolling cache's last ones. window: the sliding window, if the layers
    that get this object have one. key_ends: [B + 1] int32, the running sum of the lengths from 0, if it is at hand.

    All may be advanced in place between calls: a recorded graph reads them anew at each replay, the host never does.
    """

    key_lengths: Tensor
    key_starts: Tensor | None = None
    window: int | None = None
    key_ends: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Packed:
    """A padded batch without its padding, as packed sequences: the terms of `varlen_attention`.

    queries, keys: flat positions in [B · S] of those that take part; query_ends, key_ends: [B + 1] int32, the running
    sum of how many there are in each row; longest_query, longest_key: the greatest of these numbers.
    """

    key_ends: Tensor
    query_ends: Tensor
    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int | None = None


Padded = CacheRows | Packed


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
    """What `attend` needs to replace this mask, or None: then the mask has to be used.

    mask: [B | 1, 1, S_q, ≥ S_k], bool or additive; query: [B, H, S_q, D]; key: [B, Hkv, S_k, D]; value:
    [B, Hkv, S_k, D_v]. window: the sliding window that the mask may hold. softcap, sinks: whether the kernel must have
    them.
    Reads the mask on the host, once for all layers that get it; never while compiling or capturing a graph.
    """
    s_q, s_k = query.shape[2], key.shape[2]
    if is_compiling() or mask.shape[1:3] != (1, s_q) or s_q > s_k:
        return None
    if window is not None and window >= s_k:
        window = None  # it hides nothing
    if mask.is_inference() or not _kernel_serves(query, key, value, mask, window, softcap, sinks):
        return None  # changes of an inference tensor can't be noticed, and it would have to be read in every layer
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    state = (mask._version, s_k, window)
    kept = getattr(mask, _KEPT, None)
    if kept is not None and kept[0] == state:
        found: Padded | None = kept[1]
        return found
    seen = _as_bool(mask[:, 0, :, :s_k])
    if seen is None:
        found = None
    else:
        seen = seen.expand(query.shape[0], s_q, s_k)
        found = _filled(seen[:, 0]) if s_q == 1 else _packed(seen, window)
    setattr(mask, _KEPT, (state, found))
    return found


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padded: Padded,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention under a recognised mask; queries that see nothing are zero. Returns [B, S_q, H, D_v]."""
    if isinstance(padded, CacheRows):
        return decode.decode_attention(
            query,
            key,
            value,
            padded.key_lengths,
            scale=scale,
            starts=padded.key_starts,
            window=padded.window,
            softcap=softcap,
            sinks=sinks,
            ends=padded.key_ends,
        )
    b, h, s_q, _ = query.shape
    output = varlen.varlen_attention(
        query.transpose(1, 2).flatten(0, 1)[padded.queries],
        key.transpose(1, 2).flatten(0, 1)[padded.keys],
        value.transpose(1, 2).flatten(0, 1)[padded.keys],
        padded.query_ends,
        padded.key_ends,
        longest_query=padded.longest_query,
        longest_key=padded.longest_key,
        scale=scale,
        causal=padded.causal,
        window=padded.window,
        softcap=softcap,
    )
    whole = output.new_zeros((b * s_q, h, value.shape[3])).index_copy(0, padded.queries, output)
    return whole.view(b, s_q, h, value.shape[3])


def _filled(real: Tensor) -> CacheRows | None:
    """Single queries on rows that are filled from the front. real: [B, S_k]."""
    lengths = real.sum(-1)
    places = torch.arange(real.shape[1], device=real.device)
    if bool((real == (places < lengths[:, None])).all() & (lengths > 0).all()):
        return CacheRows(lengths, key_ends=_ends(lengths))
    return None


def _packed(seen: Tensor, window: int | None) -> Packed | None:
    """Left padding under causality and a window, or keys that nobody sees. seen: [B, S_q, S_k]."""
    b, s_q, s_k = seen.shape
    real = seen.any(1)  # what some query sees
    own = real[:, s_k - s_q :]
    if not bool(real.any(-1).all()):
        return None
    if bool((seen == real[:, None]).all()):
        return _make(real, torch.ones(b, s_q, dtype=torch.bool, device=seen.device), causal=False)
    causal = visible(s_q, s_k, causal=True, window=window, device=seen.device)
    assert causal is not None
    # a padding query that sees something has a defined result, which packing would lose: right padding stays masked
    blind = own | ~seen.any(-1)
    if bool((seen == (real[:, None] & causal)).all() & blind.all()):
        return _make(real, own, causal=True, window=window)
    return None


def _as_bool(mask: Tensor) -> Tensor | None:
    """True where a key is seen; None if the mask weighs keys instead of hiding them."""
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
    """Whether packing or lengths lead to a kernel, and the mask as it is leads to none."""
    from hf_rocm.ops.attention import mask_serves  # which imports this module

    _, heads, s_q, head_dim = query.shape
    _, kv_heads, _, value_dim = value.shape
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    common = (query.dtype, query.device, heads, kv_heads, head_dim, value_dim)
    if s_q <= decode.FEW_QUERIES and mask_serves(query, key, value, mask.dtype, softcap=softcap, sinks=sinks):
        return False
    if s_q == 1:
        return kernel_serves(decode._operation, tuple(decode.DecodeSpec(*common, softcap, sinks, grad, ends=True)))
    if sinks:
        return False
    return all(
        packing_serves(packed_specification(*common, causal=causal, window=window, softcap=softcap, grad=grad))
        for causal, window in ((True, window), (False, None))
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
) -> varlen.VarlenSpec:
    """The specification of a padded batch once it is packed; packed sequences have no sinks."""
    return varlen.VarlenSpec(dtype, device, heads, kv_heads, head_dim, value_dim, causal, window, softcap, False, grad)


def packing_serves(spec: varlen.VarlenSpec) -> bool:
    """Whether packed sequences lead to a kernel here; otherwise the mask is used as it is."""
    return kernel_serves(varlen._operation, tuple(spec))
