"""varlen_attention: attention over packed sequences of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, compiler

from hf_rocm.device import Device
from hf_rocm.ops import attention_eager, registry
from hf_rocm.ops.aiter import varlen as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.attention import torch_attention
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, LONG, Draw, small_window
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.attention import AttentionTerms, VarlenSpec, VarlenTerms
from hf_rocm.ops.triton import flash
from hf_rocm.ops.triton.detect import checked as checked_triton

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *,
    longest_query: int,
    longest_key: int,
    scale: float,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *,
    longest_query: int,
    longest_key: int,
    scale: float,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *,
    longest_query: int,
    longest_key: int,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` within each sequence of a packed batch.

    query: [T_q, H, D]; key: [T_k, Hkv, D]; value: [T_k, Hkv, D_v]. query_ends, key_ends: [B + 1] int32 on the same
    device; sequence i is between entries i and i + 1, and the first entry is 0. longest_query, longest_key: the largest
    lengths. Sequences may be empty. The output is zero for queries after the last sequence, except in the aiter tier,
    where it is undefined. The other arguments are those of `attention`.

    Returns [T_q, H, D_v]; with `lse` also the log-sum-exp of the softmax, [T_q, H] in fp32 (fp64 for fp64): the natural
    logarithm of the sum of the exponentials of a query's scores and its sink, −inf for a query that has neither. It is
    needed to combine the results of attention over different parts of the keys.
    """
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    dtype, device = query.dtype, query.device
    _, heads, head_dim = query.shape
    _, kv_heads, value_dim = value.shape
    spec = (
        dtype,
        device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        causal,
        window,
        softcap is not None,
        sinks is not None,
        grad,
        lse,
    )
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor | tuple[Tensor, Tensor] = serve(
        query,
        key,
        value,
        query_ends,
        key_ends,
        longest_query=longest_query,
        longest_key=longest_key,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        lse=lse,
    )
    return result


def kernel_serves(spec: VarlenSpec) -> bool:
    """Whether a kernel serves packed sequences of this specification."""
    return registry.kernel_serves(_operation, spec)


def _one_by_one(attention: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
    """Return a function that calls this attention for one sequence after another, and reads the lengths on the host.

    The log-sum-exp is computed from another GEMM of queries and keys.
    """

    def varlen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_ends: Tensor,
        key_ends: Tensor,
        **terms: Unpack[VarlenTerms],
    ) -> Tensor | tuple[Tensor, Tensor]:
        dense = AttentionTerms(
            scale=terms["scale"],
            causal=terms["causal"],
            mask=None,
            window=terms["window"],
            softcap=terms["softcap"],
            sinks=terms.get("sinks"),
        )
        queries, keys = pairwise(query_ends.tolist()), pairwise(key_ends.tolist())
        outputs, sums, covered = [], [], 0
        for (a, b), (c, d) in zip(queries, keys, strict=True):
            one = [part.transpose(0, 1).unsqueeze(0) for part in (query[a:b], key[c:d], value[c:d])]
            if a < b and c < d:
                outputs.append(attention(*one, **dense)[0][0])
            else:
                outputs.append(query.new_zeros(b - a, query.shape[1], value.shape[2]))
            if terms.get("lse"):
                sums.append(attention_eager.log_sum_exp(*one[:2], **dense)[0])
            covered = b
        outputs.append(query.new_zeros(len(query) - covered, query.shape[1], value.shape[2]))
        if not terms.get("lse"):
            return torch.cat(outputs)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums.append(torch.full((len(query) - covered, query.shape[1]), -torch.inf, dtype=wide, device=query.device))
        return torch.cat(outputs), torch.cat(sums)

    return varlen


# The oracle.
eager_varlen = _one_by_one(attention_eager.attention)


def _torch_refuses(spec: VarlenSpec, device: Device) -> str | None:
    if spec.softcap:
        return "SDPA has no softcap"
    return "SDPA has no sinks" if spec.sinks else None


def _cases(spec: VarlenSpec) -> Iterator[Case]:
    """Sequences of several lengths, one of them with a single query."""
    queries, keys = (LENGTH, 1, LONG), (LENGTH, LENGTH - 2, LONG + 3)
    draw = Draw(spec.dtype, spec.device)
    ends = [
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=spec.device) for lengths in (queries, keys)
    ]
    terms = VarlenTerms(
        longest_query=max(queries),
        longest_key=max(keys),
        scale=spec.head_dim**-0.5,
        causal=spec.causal,
        window=spec.window,
        softcap=2.0 if spec.softcap else None,
        sinks=draw(spec.heads) if spec.sinks else None,
        lse=spec.lse,
    )
    query, key = draw(sum(queries), spec.heads, spec.head_dim), draw(sum(keys), spec.kv_heads, spec.head_dim)
    yield Case((query, key, draw(sum(keys), spec.kv_heads, spec.value_dim), *ends), keywords=terms)


_operation = Operation("varlen_attention", VarlenSpec, _cases, small_window, family="attention", recorded=(0, 1, 2))
_operation.register(
    Implementation(
        "aiter",
        "flash_attn_varlen_func",
        aiter.packed_refuses,
        aiter.packed,
        checked("varlen_attention", "flash_attn_varlen_func"),
    )
)
_operation.register(
    Implementation(
        "triton",
        "flash_kernel",
        flash.refuses,
        flash.varlen_attention,
        checked_triton("varlen_attention", "flash_kernel"),
    )
)
_operation.register(Implementation("torch", "SDPA, one by one", _torch_refuses, _one_by_one(torch_attention)))
_operation.register(Implementation("eager", "softmax, one by one", refuses_nothing, eager_varlen))
