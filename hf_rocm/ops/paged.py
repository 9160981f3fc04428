"""paged_attention: `decode_attention` over keys and values in pages that a table assigns to rows.

Continuous batching allocates the cache in pages, so that requests of different lengths share it without gaps. The
table and the lengths are on the device, so that a recorded graph of the step stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, compiler

from hf_rocm.device import Device
from hf_rocm.ops import attention_eager, registry
from hf_rocm.ops.attention import torch_attention
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.decode import seen_keys
from hf_rocm.ops.probe_cases import LENGTH, LONG, Draw, small_window
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.attention import FEW_QUERIES, AttentionTerms, PagedSpec, PagedTerms
from hf_rocm.ops.triton import decode as triton
from hf_rocm.ops.triton.detect import checked as checked_triton

if TYPE_CHECKING:
    from typing_extensions import Unpack


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the new keys and values of each row into its pages, then attend causally to the row's keys.

    query: [B, H, S_q, D]; key_pages: [P, page, Hkv, D]; value_pages: [P, page, Hkv, D_v]; the pages may have any
    strides with a last stride of 1. table: [B, N] int32, last stride 1: key j of row b is in page
    `table[b, j // page]`. lengths: [B] int32 on the same device: the number of keys of the row, including the keys of
    these queries, at most N · page; 0 for a row without a request, whose output is zero. key: [B, Hkv, S_q, D]; value:
    [B, Hkv, S_q, D_v]: the keys and values of the queries, or None if the pages already contain them. slots: [B] int32,
    for S_q = 1: the new key of row b becomes key `slots[b]` of the row, instead of the last one, as in a ring buffer
    that keeps the last keys in any order. The other arguments are those of `decode_attention`.

    Writes to key_pages and value_pages if key is given. Kernels read no tensor on the host. Returns [B, S_q, H, D_v].
    """
    grad = torch.is_grad_enabled() and (query.requires_grad or key_pages.requires_grad or value_pages.requires_grad)
    dtype, device = query.dtype, query.device
    _, heads, s_q, head_dim = query.shape
    _, page, kv_heads, value_dim = value_pages.shape
    few_queries, new = s_q <= FEW_QUERIES, key
    spec = (
        dtype,
        device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        page,
        softcap is not None,
        sinks is not None,
        grad,
        few_queries,
        new is not None,
        window,
        slots is not None,
    )
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(
        *(query, key_pages, value_pages, table, lengths, key, value),
        slots=slots,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return result


def kernel_serves(spec: PagedSpec) -> bool:
    """Whether a kernel serves pages of this specification."""
    return registry.kernel_serves(_operation, spec)


def _gathered(attention: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Tensor]:
    """Implement `paged_attention` with this attention function, over a copy of every row's pages and with a mask."""

    def paged(
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        table: Tensor,
        lengths: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        **terms: Unpack[PagedTerms],
    ) -> Tensor:
        s_q, page = query.shape[2], key_pages.shape[1]
        if key is not None and value is not None:
            positions = lengths[:, None].long() - s_q + torch.arange(s_q, device=lengths.device)
            if terms["slots"] is not None:
                positions = terms["slots"][:, None].long().where(positions >= 0, positions)
            pages = table.long().gather(1, positions.clamp(min=0) // page)
            row, i = ((positions >= 0) & (pages >= 0)).nonzero(as_tuple=True)
            place = pages[row, i], positions[row, i] % page
            key_pages[place], value_pages[place] = key[row, :, i], value[row, :, i]
        own = table.clamp(min=0).long()
        keys, values = (pages[own].flatten(1, 2).transpose(1, 2) for pages in (key_pages, value_pages))
        seen = seen_keys(s_q, keys.shape[2], lengths, None, terms["window"])
        # Unwritten slots may contain any value.
        unused = ~seen.any(2)[..., None]
        dense = AttentionTerms(
            scale=terms["scale"], causal=False, mask=seen, window=None, softcap=terms["softcap"], sinks=terms["sinks"]
        )
        output = attention(query, keys.masked_fill(unused, 0), values.masked_fill(unused, 0), **dense)[0]
        return output.masked_fill((lengths <= 0)[:, None, None, None], 0)

    return paged


# The oracle.
eager_paged = _gathered(attention_eager.attention)


def _torch_refuses(spec: PagedSpec, device: Device) -> str | None:
    if spec.softcap:
        return "SDPA has no softcap"
    return "SDPA has no sinks" if spec.sinks else None


def _cases(spec: PagedSpec) -> Iterator[Case]:
    """Rows of several lengths, one of them without a request, with pages that are not in order."""
    draw = Draw(spec.dtype, spec.device)
    for s_q in (1,) if spec.slots else (1, 5) if spec.few_queries else (LENGTH,):
        lengths = torch.tensor([s_q, LONG, 0, LENGTH + s_q], dtype=torch.int32, device=spec.device)
        columns = -(-(LONG + 1) // spec.page)
        pages = 4 * columns + 1
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[: 4 * columns]
        table = order.view(4, columns).to(device=spec.device, dtype=torch.int32)
        table[2] = -1
        query = draw(4, s_q, spec.heads, spec.head_dim).transpose(1, 2)
        kv = tuple(draw(4, s_q, spec.kv_heads, dim).transpose(1, 2) for dim in (spec.head_dim, spec.value_dim))
        key_pages = draw(pages, spec.page, spec.kv_heads, spec.head_dim)
        value_pages = draw(pages, spec.page, spec.kv_heads, spec.value_dim)
        keywords = {
            "slots": lengths // 2 if spec.slots else None,
            "scale": spec.head_dim**-0.5,
            "window": spec.window,
            "softcap": 2.0 if spec.softcap else None,
            "sinks": draw(spec.heads) if spec.sinks else None,
        }
        new = kv if spec.new else (None, None)
        yield Case((query, key_pages, value_pages, table, lengths, *new), keywords=keywords)


_operation = Operation("paged_attention", PagedSpec, _cases, small_window, family="attention", recorded=(0, 1, 2))
_operation.register(
    Implementation(
        "triton",
        "decode_kernel, pages",
        triton.refuses,
        triton.paged_attention,
        checked_triton("paged_attention", "decode_kernel, pages"),
    )
)
_operation.register(Implementation("torch", "SDPA, gathered pages", _torch_refuses, _gathered(torch_attention)))
_operation.register(Implementation("eager", "softmax, gathered pages", refuses_nothing, eager_paged))
