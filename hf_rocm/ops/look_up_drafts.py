"""look_up_drafts: the search of prompt lookup on the device, so that the next step can be queued before the accepted
tokens are on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.step import LookUpDraftsSpec
from hf_rocm.ops.triton import step as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.ops.triton.launch import power_of_two


def look_up_drafts(ids: Tensor, step_ids: Tensor, selected: Tensor, header: Tensor, *, ngram: int) -> None:
    """Write the position of the next step of prompt lookup, and where its drafts begin, to header.

    ids: [1, S], the tokens before a step; the last one is also the step's first token. step_ids: [1, N], the tokens of
    the step: the last token and N - 1 drafts. selected: [1, N], the tokens that the model chose. header: [2]. All are
    int64. With n the largest number for which the first n drafts equal the first n selected tokens, the first n + 1
    selected tokens continue the sequence. header[0] receives S + n, the position of the last token of the continued
    sequence. header[1] receives the position after the first earlier occurrence of its last tokens, for the longest
    n-gram of at most `ngram` tokens that has one, or else the length of the continued sequence.
    """
    _operation.calls[_specification(ids, step_ids, selected, header, ngram)](ids, step_ids, selected, header, ngram)


def one_kernel(ids: Tensor, step_ids: Tensor, selected: Tensor, header: Tensor, *, ngram: int) -> bool:
    """Whether one kernel computes `look_up_drafts`, without waiting for the device."""
    return kernel_serves(_operation, _specification(ids, step_ids, selected, header, ngram))


def _specification(ids: Tensor, step_ids: Tensor, selected: Tensor, header: Tensor, ngram: int) -> tuple[object, ...]:
    tensors = ids, step_ids, selected, header
    dtype, device, tokens, grad = ids.dtype, ids.device, step_ids.shape[1], False
    contiguous = all([tensor.is_contiguous() for tensor in tensors])
    all_int64 = all([tensor.dtype == torch.int64 for tensor in tensors])
    same_device = all([tensor.device == device for tensor in tensors])
    return (dtype, device, tokens, ngram, contiguous, all_int64, same_device, grad)


def stock(ids: Tensor, step_ids: Tensor, selected: Tensor, header: Tensor, ngram: int) -> tuple[Tensor]:
    """PyTorch's operations, which read the tokens on the host. Returns header."""
    drafts, chosen = step_ids[0].tolist(), selected[0].tolist()
    count = 0
    while count < len(chosen) - 1 and drafts[count + 1] == chosen[count]:
        count += 1
    tokens = [*ids[0].tolist(), *chosen[: count + 1]]
    header[0], header[1] = len(tokens) - 1, _after_match(tokens, ngram)
    return (header,)


def _after_match(tokens: list[int], ngram: int) -> int:
    for size in range(min(ngram, len(tokens) - 1), 0, -1):
        for first in range(len(tokens) - size):
            if tokens[first : first + size] == tokens[-size:]:
                return first + size
    return len(tokens)


def _cases(spec: LookUpDraftsSpec) -> Iterator[Case]:
    """Yield calls in which all, some or no drafts are accepted, with and without a match."""
    on_device: dict[str, Any] = {"device": spec.device}
    tokens = spec.tokens
    for length, period, accepted in ((1, 7, 0), (40, 9, tokens), (3000, 1201, tokens // 2), (2500, 5000, 1)):
        ids = (torch.arange(length, **on_device) % period)[None]
        selected = (torch.arange(length, length + tokens, **on_device) % period)[None]
        step_ids = torch.cat((ids[:, -1:], selected[:, :-1]), dim=1)
        step_ids[:, 1 + accepted :] = -1
        yield Case((ids, step_ids, selected, torch.zeros(2, dtype=torch.int64, **on_device)), (spec.ngram,))


def _kind(spec: LookUpDraftsSpec) -> LookUpDraftsSpec:
    return spec._replace(tokens=power_of_two(spec.tokens))


_operation = Operation("look_up_drafts", LookUpDraftsSpec, _cases, kind=_kind, family="linear", recorded=(0,))
_operation.register(
    Implementation(
        "triton",
        triton.LOOK_UP,
        triton.look_up_refuses,
        triton.look_up_drafts,
        checked_triton("look_up_drafts", triton.LOOK_UP),
    )
)
_operation.register(Implementation("torch", "a search on the host", refuses_nothing, stock))
_operation.register(Implementation("eager", "a search on the host", refuses_nothing, stock))
