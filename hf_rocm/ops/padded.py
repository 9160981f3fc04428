"""A padded batch, recognised in its mask and brought into a form that kernels without masks can use.

transformers hands attention a [B, 1, S_q, S_k] mask whatever the reason for it. Where that mask is nothing but left
padding under causality, keys hidden from everybody, or the filled part of a static cache, packed sequences or lengths
say the same. It is compared element by element, once for each mask, and only where a kernel would take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import decode, varlen
from hf_rocm.ops.attention_eager import visible
from hf_rocm.ops.registry import Operation

_KEPT = "_hf_rocm_padded"  # on the mask itself: (its version, S_k, what was recognised)


@dataclass(frozen=True, eq=False)
class Padded:
    """What a mask says in other words.

    key_ends: [B + 1] int32, the running sum of the rows' real keys. Without rows, each row sees its first keys (single
    queries). With them: queries and keys are flat positions in [B · S] of those that take part, query_ends and the
    longest lengths belong to them.
    """

    key_ends: Tensor
    query_ends: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    longest_query: int = 1
    longest_key: int = 1
    causal: bool = False


def recognise(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Padded | None:
    """What `attend` needs to replace this mask, or None: then the mask has to be used.

    mask: [B | 1, 1, S_q, ≥ S_k] bool; query: [B, H, S_q, D]; key: [B, Hkv, S_k, D]; value: [B, Hkv, S_k, D_v].
    Reads the mask on the host, once for all layers that get it; never while compiling or capturing a graph.
    """
    s_q, s_k = query.shape[2], key.shape[2]
    if is_compiling() or mask.dtype != torch.bool or mask.shape[1:3] != (1, s_q) or s_q > s_k:
        return None
    if not _kernel_serves(query, key, value) or mask.is_inference():
        return None  # changes of an inference tensor can't be noticed, and it would have to be read in every layer
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    kept = getattr(mask, _KEPT, None)
    if kept is not None and kept[:2] == (mask._version, s_k):
        found: Padded | None = kept[2]
        return found
    seen = mask[:, 0, :, :s_k].expand(query.shape[0], s_q, s_k)
    found = _filled(seen[:, 0]) if s_q == 1 else _packed(seen)
    setattr(mask, _KEPT, (mask._version, s_k, found))
    return found


def attend(query: Tensor, key: Tensor, value: Tensor, padded: Padded, *, scale: float) -> Tensor:
    """Attention under a recognised mask; queries that see nothing are zero. Returns [B, S_q, H, D_v]."""
    if padded.queries is None or padded.query_ends is None:
        return decode.decode_attention(query, key, value, padded.key_ends, scale=scale)
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
    )
    whole = output.new_zeros((b * s_q, h, value.shape[3])).index_copy(0, padded.queries, output)
    return whole.view(b, s_q, h, value.shape[3])


def _filled(real: Tensor) -> Padded | None:
    """Single queries on rows that are filled from the front. real: [B, S_k]."""
    lengths = real.sum(-1)
    places = torch.arange(real.shape[1], device=real.device)
    if bool((real == (places < lengths[:, None])).all() & (lengths > 0).all()):
        return Padded(_ends(lengths))
    return None


def _packed(seen: Tensor) -> Padded | None:
    """Left padding under causality, or keys that nobody sees. seen: [B, S_q, S_k]."""
    b, s_q, s_k = seen.shape
    real = seen[:, -1]  # what the last query sees
    own = real[:, s_k - s_q :]
    if not bool(real.any(-1).all()):
        return None
    if bool((seen == real[:, None]).all()):
        return _make(real, torch.ones(b, s_q, dtype=torch.bool, device=seen.device), causal=False)
    causal = visible(s_q, s_k, causal=True, window=None, device=seen.device)
    assert causal is not None
    # a padding query that sees something has a defined result, which packing would lose: right padding stays masked
    blind = own | ~seen.any(-1)
    if bool((seen == (real[:, None] & causal)).all() & blind.all()):
        return _make(real, own, causal=True)
    return None


def _make(real: Tensor, own: Tensor, *, causal: bool) -> Padded:
    queries, keys = own.sum(-1), real.sum(-1)
    return Padded(
        key_ends=_ends(keys),
        query_ends=_ends(queries),
        queries=own.flatten().nonzero()[:, 0],
        keys=real.flatten().nonzero()[:, 0],
        longest_query=int(queries.max()),
        longest_key=int(keys.max()),
        causal=causal,
    )


def _ends(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _kernel_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether packing or lengths lead to a kernel; SDPA takes the mask as it is."""
    _, heads, s_q, head_dim = query.shape
    _, kv_heads, _, value_dim = value.shape
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    common = (query.dtype, query.device, heads, kv_heads, head_dim, value_dim)
    if s_q == 1:
        return _chosen(decode._operation, (*common, False, False, grad))
    return all(packing_serves(packed_specification(*common, causal=causal, grad=grad)) for causal in (True, False))


def packed_specification(
    dtype: torch.dtype,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    *,
    causal: bool,
    grad: bool = False,
) -> varlen.VarlenSpec:
    """The specification of a padded batch once it is packed: no window, softcap or sinks."""
    return varlen.VarlenSpec(dtype, device, heads, kv_heads, head_dim, value_dim, causal, None, False, False, grad)


def packing_serves(spec: varlen.VarlenSpec) -> bool:
    """Whether packed sequences lead to a kernel here; otherwise the mask is used as it is."""
    return _chosen(varlen._operation, tuple(spec))


def _chosen(operation: Operation[Any], spec: tuple[Any, ...]) -> bool:
    try:
        return operation.choose(spec).implementation.tier not in ("torch", "eager")
    except TierUnavailable:  # a tier was named that has no such form: the dense call says so, in its own words
        return False
