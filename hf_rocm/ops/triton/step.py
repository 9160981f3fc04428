"""The end of a decode step through hf_rocm's kernels: what is derived from the logits, and the appended tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import on_its_device
from hf_rocm.ops.specs.step import FinishStepCall
from hf_rocm.ops.triton import detect, norm
from hf_rocm.ops.triton.launch import launch, power_of_two, warps

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.step import AppendTokensSpec, FinishStepSpec

NAME, APPEND = "logits_kernel", "append_kernel"
MOST = 256  # the largest number of rows
PROGRAMS = 512  # the largest number of programs that read the logits; the next kernel reads the result of each
MOST_ENDS = 16  # the largest number of end tokens
BLOCK = 1024


def refuses(spec: FinishStepSpec, device: Device) -> str | None:
    """Why the kernels can't serve this step, or None."""
    if spec.grad:
        return "our kernel for logits has no gradient"
    if spec.dtype not in norm.DTYPES:
        return f"our kernel for logits supports fp32, bf16 and fp16, not {spec.dtype}"
    if not spec.contiguous:
        return "our kernel for logits needs contiguous tensors"
    if not 0 < spec.rows <= MOST:
        return f"our kernel for logits takes at most {MOST} rows, got {spec.rows}"
    return detect.unavailable(device)


def parts(count: int, dim: int) -> int:
    """The number of programs for a row: the smallest power of two for which each program reads at most one block.

    It is limited to 128, and to PROGRAMS for all rows together.
    """
    most = min(PROGRAMS // power_of_two(count), power_of_two(-(-dim // BLOCK)), 128)
    return max(1, most)


def finish_step(call: FinishStepCall) -> tuple[Tensor, ...]:
    """See `hf_rocm.ops.finish_step`. Returns tokens, digests and doubt."""
    result: tuple[Tensor, ...] = _finish_step(*call)
    return result


@on_its_device
def _finish_step(*arguments: Any) -> tuple[Tensor, ...]:
    from hf_rocm.ops.triton.kernels.step import finish_kernel, logits_kernel

    logits, words, out, tokens, digests, doubt, further = FinishStepCall(*arguments)
    count, dim = tokens.numel(), logits.shape[-1]
    pieces = parts(count, dim)
    largest = tokens.new_empty((2, count * pieces))
    wrong = tokens.new_empty(count * pieces, dtype=torch.int32)
    launch(
        logits_kernel,
        (pieces, count),
        (logits, words, out, largest[0], largest[1], wrong, dim, words.numel()),
        {"PARTS": pieces, "BLOCK": BLOCK},
        num_warps=warps(256, logits.device),
    )
    launch(
        finish_kernel,
        (1,),
        (largest[0], largest[1], wrong, further, tokens, digests, doubt, count),
        {"PARTS": pieces, "ROWS": power_of_two(count), "KEPT": len(digests), "SLOTS": power_of_two(len(digests))},
        num_warps=1,
    )
    return tokens, digests, doubt


def append_refuses(spec: AppendTokensSpec, device: Device) -> str | None:
    """Why the kernel can't append the tokens, or None."""
    if not (spec.contiguous and spec.wide and spec.here):
        return "our kernel that appends tokens needs contiguous tensors of int64 on one device"
    if not 0 < spec.rows <= MOST:
        return f"our kernel that appends tokens takes at most {MOST} rows, got {spec.rows}"
    if spec.ends > MOST_ENDS:
        return f"our kernel that appends tokens takes at most {MOST_ENDS} end tokens, got {spec.ends}"
    return detect.unavailable(device)


@on_its_device
def append_tokens(
    ids: Tensor, tokens: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_rocm.ops.append_tokens`."""
    from hf_rocm.ops.triton.kernels.step import append_kernel

    rows, length = ids.shape
    out, going = ids.new_empty((rows, length + 1)), torch.empty_like(unfinished)
    done = torch.empty((), dtype=torch.bool, device=ids.device)
    launch(
        append_kernel,
        (-(-(length + 1) // BLOCK), rows),
        (ids, tokens, unfinished, ends, pad, out, going, done.view(torch.uint8), length, rows),
        {
            "ENDS": 0 if ends is None else len(ends),
            "ROWS": power_of_two(rows),
            "SLOTS": 1 if ends is None else power_of_two(len(ends)),
            "BLOCK": BLOCK,
        },
        num_warps=warps(256, ids.device),
    )
    return out, going, done
