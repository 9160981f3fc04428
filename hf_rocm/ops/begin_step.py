"""begin_step: write the inputs of a decode step other than weights, keys and values, in one operation.

These inputs are the positions and lengths of the step's tokens, the attention masks, the rows of the cache that the
step writes to, and its token ids. Separate operations would launch four to ten kernels between two recorded steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing, serving
from hf_rocm.ops.specs.step import BeginStepCall, BeginStepSpec
from hf_rocm.ops.triton import step as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.ops.triton.launch import power_of_two


def begin_step(call: BeginStepCall) -> None:
    """Write the tensors that a step reads and that depend on its position; see `BeginStepCall`."""
    serving(_operation, _specification(call), stock)(call)


def _specification(call: BeginStepCall) -> tuple[object, ...]:
    clock, mask, second = call.clock, call.mask, call.mask_2
    device, tokens, clocks = clock.device, clock.shape[1], clock.numel()
    dtype, batch, masks_match = torch.uint8, 1, True
    if mask is not None:
        dtype, batch = mask.dtype, mask.shape[0]
        masks_match = second is None or (second.dtype == dtype and second.shape[0] == batch)
    masks = (mask is not None) + (second is not None)
    places = (call.places is not None) + (call.places_2 is not None)
    sources = (call.ids is not None) + (call.extra_ids is not None)
    header = call.header is not None
    window, window_2 = call.window, call.window_2
    starts = call.starts is not None or call.starts_2 is not None
    contiguous = all([tensor is None or tensor.is_contiguous() for tensor in call[:12]])
    grad = False
    return (
        dtype,
        device,
        masks,
        batch,
        tokens,
        window,
        window_2,
        starts,
        clocks,
        places,
        sources,
        header,
        masks_match,
        contiguous,
        grad,
    )


def stock(call: BeginStepCall) -> tuple[Tensor, ...]:
    """Write the tensors with PyTorch's operations. Returns them. Synchronises with the device if there is a header."""
    if call.header is not None:
        position, drafts = call.header.tolist()
        call = call._replace(
            header=None,
            position=call.position + position,
            row=call.row + position,
            row_2=call.row_2 + position,
            first=call.first + position,
            drafts=call.drafts + drafts,
        )
    torch.add(call.relative, call.position, out=call.clock)
    for places, row in ((call.places, call.row), (call.places_2, call.row_2)):
        if places is not None:
            torch.arange(row, row + len(places), out=places)
    if call.mask is not None:
        _write_mask(call.mask, call.clock[1], call.starts, call.window, call.hidden, call.rolling)
    if call.mask_2 is not None:
        _write_mask(call.mask_2, call.clock[2], call.starts_2, call.window_2, call.hidden, call.rolling)
    if call.input_ids is not None and call.ids is not None:
        ids = call.ids if call.extra_ids is None else torch.cat((call.ids, call.extra_ids), dim=1)
        drafts = ids[:, call.drafts : call.drafts + call.input_ids.shape[1] - 1]
        call.input_ids.zero_()[:, :1].copy_(ids[:, call.first : call.first + 1])
        call.input_ids[:, 1 : 1 + drafts.shape[1]].copy_(drafts)
    return _written(call)


def _write_mask(
    mask: Tensor, lengths: Tensor, starts: Tensor | None, window: int | None, hidden: float | None, rolling: bool
) -> None:
    """Write the mask of one kind of layer, [B, 1, N, L]. lengths: [N], one for each token of the step."""
    column = torch.arange(mask.shape[3], device=mask.device)
    ends = lengths[:, None]
    if rolling:
        dropped = (ends - mask.shape[3]).clamp(min=0)
        ends = ends - dropped
    seen = torch.lt(column, ends.expand(*mask.shape[:3], 1))
    if window is not None:
        seen.logical_and_(column >= ends - window)
    if starts is not None:
        first = starts[:, None, None, None]
        seen.logical_and_(column >= (first - dropped if rolling else first))
    if hidden is None:
        mask.copy_(seen)
    else:
        mask.fill_(hidden).masked_fill_(seen, 0.0)


def _written(call: BeginStepCall) -> tuple[Tensor, ...]:
    written = call.clock, call.mask, call.mask_2, call.places, call.places_2, call.input_ids
    return tuple(tensor for tensor in written if tensor is not None)


def _cases(spec: BeginStepSpec) -> Iterator[Case]:
    """Yield calls with a short and a long sequence. Adjacent tokens of the step have different lengths."""
    on_device: dict[str, Any] = {"device": spec.device}
    batch, tokens = spec.batch, spec.tokens
    hidden = None if spec.dtype == torch.uint8 else torch.finfo(spec.dtype).min
    # The header of these cases adds 2 to the position.
    for position in (1, 1020):
        relative = torch.arange(spec.clocks, **on_device).view(-1, tokens) % 5 + 1
        masks = [torch.ones((batch, 1, tokens, size), dtype=spec.dtype, **on_device) for size in (1030, 1037)]
        starts = [torch.arange(batch, **on_device) % 3 if spec.starts else None] * spec.masks
        places = [torch.zeros(21, dtype=torch.int64, **on_device) for _ in range(spec.places)]
        ids, extra_ids, first, drafts = None, None, 8, 9 - tokens
        if spec.sources:
            ids = torch.arange(batch * 9, **on_device).view(batch, 9)
        if spec.sources > 1:
            extra_ids = 100 + torch.arange(batch * (tokens + 1), **on_device).view(batch, -1)
            first, drafts = 9 + tokens, 9 - tokens // 2
        yield Case(
            (
                torch.zeros_like(relative),
                relative,
                *_two(masks[: spec.masks]),
                *_two(starts),
                *_two(places),
                None if ids is None else torch.zeros((batch, tokens), dtype=torch.int64, **on_device),
                ids,
                extra_ids,
                torch.tensor([2, 1], **on_device) if spec.header else None,
            ),
            (position, spec.window, spec.window_2, hidden, True, 3, 43, first - 2 * spec.header, drafts - spec.header),
        )


def _two(tensors: list[Tensor] | list[Tensor | None]) -> list[Tensor | None]:
    return [*tensors, None, None][:2]


def _kind(spec: BeginStepSpec) -> BeginStepSpec:
    """Round the batch size and the number of tokens (at most 8) up to powers of two, and set every window to 5.

    A window of 5 keys hides keys in `_cases`.
    """
    tokens = min(8, power_of_two(spec.tokens))
    windows = [None if window is None else 5 for window in (spec.window, spec.window_2)]
    return spec._replace(
        batch=power_of_two(spec.batch),
        tokens=tokens,
        window=windows[0],
        window_2=windows[1],
        clocks=tokens * (1 + spec.masks),
    )


_operation = Operation(
    "begin_step", BeginStepSpec, _cases, kind=_kind, family="linear", terms=BeginStepCall, recorded=(0,)
)
_operation.register(
    Implementation(
        "triton",
        triton.BEGIN,
        triton.begin_refuses,
        triton.begin_step,
        checked_triton("begin_step", triton.BEGIN),
    )
)
_operation.register(Implementation("torch", "add, lt, where", refuses_nothing, stock))
_operation.register(Implementation("eager", "add, lt, where", refuses_nothing, stock))
