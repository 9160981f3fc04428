"""append_tokens: the bookkeeping of transformers' sampling loop after a step, in one operation.

Rows that have ended get the padding token, the tokens are appended, and rows that reach an EOS token end. transformers
computes this in five to eleven kernels per step, between two recorded steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.step import AppendTokensCall, AppendTokensSpec
from hf_rocm.ops.triton import step as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.ops.triton.launch import power_of_two


def append_tokens(
    ids: Tensor,
    tokens: Tensor,
    unfinished: Tensor,
    ends: Tensor | None = None,
    pad: Tensor | None = None,
    step_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a token to every row, and determine which rows are still unfinished.

    ids: [B, S]; tokens: [B]; unfinished: [B], 1 for rows that have not ended, else 0. ends: [E], the tokens that end a
    row, or None. pad: [], the token of rows that have ended, or None if these rows also take their tokens from
    `tokens`. step_ids: [B, 1], to which the appended tokens are written too, or None. All tensors are int64. Returns
    (ids [B, S + 1], unfinished [B], whether no row is unfinished, [] bool), all new tensors.
    """
    call = AppendTokensCall(ids, tokens, unfinished, ends, pad, step_ids)
    appended, after, done, *_ = _operation.calls[_specification(call)](call)
    return appended, after, done


def one_kernel(
    ids: Tensor, tokens: Tensor, unfinished: Tensor, ends: Tensor | None = None, pad: Tensor | None = None
) -> bool:
    """Whether one kernel computes `append_tokens`, so that it is faster than transformers' operations."""
    return kernel_serves(_operation, _specification(AppendTokensCall(ids, tokens, unfinished, ends, pad)))


def _specification(call: AppendTokensCall) -> tuple[object, ...]:
    ids, _, _, end_tokens, pad, step_ids = call
    tensors = [tensor for tensor in call if tensor is not None]
    dtype, device, rows, padded, grad = ids.dtype, ids.device, len(ids), pad is not None, False
    copied = step_ids is not None
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    all_int64 = all(tensor.dtype == torch.int64 for tensor in tensors)
    same_device = all(tensor.device == device for tensor in tensors)
    ends = 0 if end_tokens is None else len(end_tokens)
    return (dtype, device, rows, ends, padded, copied, contiguous, all_int64, same_device, grad)


def stock(call: AppendTokensCall) -> tuple[Tensor, ...]:
    """transformers' operations. Returns `step_ids` too if it is given."""
    ids, tokens, unfinished, ends, pad, step_ids = call
    if pad is not None:
        tokens = tokens * unfinished + pad * (1 - unfinished)
    if ends is not None:
        unfinished = unfinished & ~torch.isin(tokens, ends)
    copies = () if step_ids is None else (step_ids.copy_(tokens[:, None]),)
    return torch.cat((ids, tokens[:, None]), dim=-1), unfinished.clone(), unfinished.max() == 0, *copies


def _cases(spec: AppendTokensSpec) -> Iterator[Case]:
    """Rows that end now, rows that have ended before, and rows that continue; in the last case, all rows have ended."""
    rows = spec.rows
    row = torch.arange(rows, device=spec.device)
    ends = 3 + torch.arange(spec.ends, device=spec.device) if spec.ends else None
    pad = torch.tensor(9, device=spec.device) if spec.padded else None
    for length, continuing in ((1, row % 3 != 1), (1100, row % 2 == 0), (5, row < 0)):
        ids = torch.arange(rows * length, device=spec.device).view(rows, length)
        step_ids = torch.zeros((rows, 1), dtype=torch.int64, device=spec.device) if spec.copied else None
        yield Case((ids, row % 23, continuing.long(), ends, pad, step_ids))


def _kind(spec: AppendTokensSpec) -> AppendTokensSpec:
    return spec._replace(rows=power_of_two(spec.rows))


_operation = Operation(
    "append_tokens", AppendTokensSpec, _cases, kind=_kind, family="linear", terms=AppendTokensCall, recorded=(0,)
)
_operation.register(
    Implementation(
        "triton",
        triton.APPEND,
        triton.append_refuses,
        triton.append_tokens,
        checked_triton("append_tokens", triton.APPEND),
    )
)
_operation.register(Implementation("torch", "isin, cat", refuses_nothing, stock))
_operation.register(Implementation("eager", "isin, cat", refuses_nothing, stock))
