"""The start and the end of a decode step through hf_rocm's kernels: its inputs, the outputs computed from its logits,
the appended tokens, and the lookup of drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import on_its_device
from hf_rocm.ops.specs.step import AppendTokensCall, BeginStepCall, FinishStepCall
from hf_rocm.ops.triton import detect, norm
from hf_rocm.ops.triton.launch import form, forms_of, launch, power_of_two, warps

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.step import AppendTokensSpec, BeginStepSpec, FinishStepSpec, LookUpDraftsSpec

BEGIN, LOOK_UP, NAME, APPEND = "begin_kernel", "look_up_kernel", "logits_kernel", "append_kernel"
# The largest number of rows.
MOST = 256
# The largest number of programs that read the logits; the next kernel reads the result of each.
PROGRAMS = 512
# The largest number of EOS tokens.
MOST_ENDS = 16
# The length of the longest n-gram that is searched for.
MOST_NGRAM = 8
# The largest number of positions and lengths.
MOST_CLOCKS = 4096
BLOCK = 1024


def begin_refuses(spec: BeginStepSpec, device: Device) -> str | None:
    """Why the kernel can't write the inputs of this step, or None."""
    if spec.dtype not in (torch.uint8, *norm.DTYPES):
        return f"the kernel that begins a step supports masks in bool, fp32, bf16 and fp16, not {spec.dtype}"
    if not (spec.contiguous and spec.masks_match):
        return "the kernel that begins a step needs contiguous tensors, and masks of one dtype and batch size"
    if spec.clocks > MOST_CLOCKS:
        return f"the kernel that begins a step takes at most {MOST_CLOCKS} positions and lengths, got {spec.clocks}"
    return detect.unavailable(device)


def begin_step(call: BeginStepCall) -> tuple[torch.Tensor, ...]:
    """See `hf_rocm.ops.begin_step`. Returns the tensors that were written to."""
    result: tuple[torch.Tensor, ...] = _begin_step(*call)
    return result


@on_its_device
def _begin_step(*arguments: Any) -> tuple[torch.Tensor, ...]:
    from hf_rocm.ops.triton.kernels.step import begin_kernel

    call = BeginStepCall(*arguments)
    clock, _, mask, mask_2, *_ = tensors = call[:12]
    rows, tokens = clock.shape
    places, input_ids = call.places, call.input_ids
    size, size_2 = (0 if one is None else one.shape[3] for one in (mask, mask_2))
    batch = len(mask) if mask is not None else len(input_ids) if input_ids is not None else 1
    length, more = (0 if ids is None else ids.shape[1] for ids in (call.ids, call.extra_ids))
    sizes = call.window, call.window_2, size, size_2, tokens
    launch(
        begin_kernel,
        (max(1, -(-max(size, size_2) // BLOCK)), batch * tokens),
        (*tensors, call.position, call.row, call.row_2, call.first, call.drafts, length, more, *sizes),
        {
            "CLOCKS": rows * tokens,
            "SLOTS": power_of_two(rows * tokens),
            "PLACES": 0 if places is None else len(places),
            "PLACE_SLOTS": 1 if places is None else power_of_two(len(places)),
            "HIDDEN": call.hidden,
            "BLOCK": BLOCK,
        },
        num_warps=warps(256, clock.device),
        forms=(
            forms_of(*tensors),
            *map(form, sizes),
        ),
    )
    written = clock, mask, mask_2, places, call.places_2, input_ids
    return tuple([tensor for tensor in written if tensor is not None])


def look_up_refuses(spec: LookUpDraftsSpec, device: Device) -> str | None:
    """Why the kernel can't search for these drafts, or None."""
    if not (spec.contiguous and spec.all_int64 and spec.same_device):
        return "the kernel that looks up drafts needs contiguous tensors of int64 on one device"
    if not 0 < spec.ngram <= MOST_NGRAM:
        return f"the kernel that looks up drafts takes n-grams of 1 to {MOST_NGRAM} tokens, got {spec.ngram}"
    return detect.unavailable(device)


@on_its_device
def look_up_drafts(
    ids: torch.Tensor, step_ids: torch.Tensor, selected: torch.Tensor, header: torch.Tensor, ngram: int
) -> tuple[torch.Tensor]:
    """See `hf_rocm.ops.look_up_drafts`. Returns header."""
    from hf_rocm.ops.triton.kernels.look_up import look_up_kernel

    tokens = step_ids.shape[1]
    launch(
        look_up_kernel,
        (1,),
        (ids, step_ids, selected, header, ids.shape[1], tokens),
        {"NGRAM": ngram, "SLOTS": power_of_two(tokens), "BLOCK": BLOCK},
        num_warps=warps(256, ids.device),
    )
    return (header,)


def refuses(spec: FinishStepSpec, device: Device) -> str | None:
    """Why the kernels can't serve this step, or None."""
    if spec.grad:
        return "the kernel for logits has no gradient"
    if spec.dtype not in norm.DTYPES:
        return f"the kernel for logits supports fp32, bf16 and fp16, not {spec.dtype}"
    if not spec.contiguous:
        return "the kernel for logits needs contiguous tensors"
    if not 0 < spec.rows <= MOST:
        return f"the kernel for logits takes at most {MOST} rows, got {spec.rows}"
    return detect.unavailable(device)


def parts(count: int, dim: int) -> int:
    """The number of programs for a row: the smallest power of two for which each program reads at most one block.

    It is limited to 128, and to PROGRAMS for all rows together.
    """
    most = min(PROGRAMS // power_of_two(count), power_of_two(-(-dim // BLOCK)), 128)
    return max(1, most)


def finish_step(call: FinishStepCall) -> tuple[Tensor, ...]:
    """See `hf_rocm.ops.finish_step`. Returns the tensors that were written to, except `out`."""
    result: tuple[Tensor, ...] = _finish_step(*call)
    return result


@on_its_device
def _finish_step(*arguments: Any) -> tuple[Tensor, ...]:
    from hf_rocm.ops.triton.kernels.step import finish_kernel, logits_kernel

    logits, words, out, tokens, digests, doubt, further, probability = FinishStepCall(*arguments)
    count, dim = tokens.numel(), logits.shape[-1]
    pieces = parts(count, dim)
    largest = tokens.new_empty((2, count * pieces))
    wrong = tokens.new_empty(count * pieces, dtype=torch.int32)
    exponentials = None if probability is None else doubt.new_empty((2, count * pieces), dtype=torch.float32)
    launch(
        logits_kernel,
        (pieces, count),
        (logits, words, out, largest[0], largest[1], wrong, exponentials, dim, words.numel()),
        {"PARTS": pieces, "BLOCK": BLOCK},
        num_warps=warps(256, logits.device),
    )
    launch(
        finish_kernel,
        (1,),
        (largest[0], largest[1], wrong, exponentials, further, tokens, digests, doubt, probability, count),
        {"PARTS": pieces, "ROWS": power_of_two(count), "KEPT": len(digests), "SLOTS": power_of_two(len(digests))},
        num_warps=1,
    )
    return (tokens, digests, doubt) if probability is None else (tokens, digests, doubt, probability)


def append_refuses(spec: AppendTokensSpec, device: Device) -> str | None:
    """Why the kernel can't append the tokens, or None."""
    if not (spec.contiguous and spec.all_int64 and spec.same_device):
        return "the kernel that appends tokens needs contiguous tensors of int64 on one device"
    if not 0 < spec.rows <= MOST:
        return f"the kernel that appends tokens takes at most {MOST} rows, got {spec.rows}"
    if spec.ends > MOST_ENDS:
        return f"the kernel that appends tokens takes at most {MOST_ENDS} EOS tokens, got {spec.ends}"
    return detect.unavailable(device)


def append_tokens(call: AppendTokensCall) -> tuple[Tensor, ...]:
    """See `hf_rocm.ops.append_tokens`. Returns `step_ids` too if it is given."""
    result: tuple[Tensor, ...] = _append_tokens(*call)
    return result


@on_its_device
def _append_tokens(*arguments: Any) -> tuple[Tensor, ...]:
    from hf_rocm.ops.triton.kernels.step import append_kernel

    ids, _, unfinished, ends, _, step_ids = arguments
    rows, length = ids.shape
    out, unfinished_after = ids.new_empty((rows, length + 1)), torch.empty_like(unfinished)
    done = torch.empty((), dtype=torch.bool, device=ids.device)
    launch(
        append_kernel,
        (-(-(length + 1) // BLOCK), rows),
        (*arguments, out, unfinished_after, done.view(torch.uint8), length, rows),
        {
            "ENDS": 0 if ends is None else len(ends),
            "ROWS": power_of_two(rows),
            "SLOTS": 1 if ends is None else power_of_two(len(ends)),
            "BLOCK": BLOCK,
        },
        num_warps=warps(256, ids.device),
    )
    return (out, unfinished_after, done) if step_ids is None else (out, unfinished_after, done, step_ids)
