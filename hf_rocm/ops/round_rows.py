"""round_rows: the inputs of 8-bit GEMMs, each row rounded with its own scale.

In PyTorch this takes six to eight operations, which read and write five to eight times as many bytes as one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, compiler

from hf_rocm.ops.custom_op import compiling, on_its_device
from hf_rocm.ops.eight_bit import largest, quantize_rows
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.quantized import QuantizedCall, RoundingSpec
from hf_rocm.ops.triton import rounding as triton
from hf_rocm.ops.triton.detect import checked as checked_triton


def round_rows(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `eight_bit.quantize_rows` of x [M, K]: rows [M, K] in the format and scales [M, 1], both contiguous."""
    # torch.compile fuses the operations itself.
    if compiling() or compiler._is_compiling_flag:
        rows, scale = quantize_rows(x, format)
        return rows.contiguous(), scale.contiguous()
    spec = _specification(x, format)
    # The options of `linear` apply, and the tier that they select may not implement this operation.
    serve = _operation.calls[spec] if kernel_serves(_operation, spec) else torch_round_rows
    data, scale = serve(x, format)
    return data.view(format), scale


def rounded_input(call: QuantizedCall) -> tuple[Tensor, Tensor]:
    """The rows of a call's x [M, K], rounded to the weight's format, and their scales [M, 1]."""
    return round_rows(call.x.reshape(-1, call.x.shape[-1]), call.format)


def _specification(x: Tensor, format: torch.dtype) -> tuple[object, ...]:
    dtype, device, dim = x.dtype, x.device, x.shape[-1]
    return (dtype, format, device, dim)


def torch_round_rows(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """PyTorch's operations. Returns the bytes of the rows as uint8, like all implementations."""
    rows, scale = quantize_rows(x, format)
    return rows.contiguous().view(torch.uint8), scale.contiguous()


def _kind(spec: RoundingSpec) -> RoundingSpec:
    """The specification with fewer columns, but the same tile."""
    return spec if spec.dim <= 2 * triton.WIDEST else spec._replace(dim=2 * triton.WIDEST + spec.dim % triton.WIDEST)


def _cases(spec: RoundingSpec) -> Iterator[Case]:
    """Rows of different magnitudes, and a row of zeros.

    The scales are powers of two, so that a number midway between two numbers of the format is midway in every dtype.
    """
    draw, top = Draw(spec.dtype, spec.device), largest(spec.format)
    for m in (1, LENGTH):
        x = (draw(m, spec.dim) * (top / 4)).clamp(-top, top)
        x[:, 0] = top
        x *= 2.0 ** -torch.arange(m, device=spec.device).remainder(7)[:, None]
        if m > 1:
            x[1] = 0
        yield Case((x,), (spec.format,))


_operation = Operation("round_rows", RoundingSpec, _cases, _kind, family="linear", recorded=(0,))
_operation.register(
    Implementation(
        "triton",
        triton.NAME,
        triton.refuses,
        on_its_device(triton.round_rows),
        checked_triton("round_rows", triton.NAME),
    )
)
_operation.register(Implementation("torch", "quantize_rows", refuses_nothing, torch_round_rows))
_operation.register(Implementation("eager", "quantize_rows", refuses_nothing, torch_round_rows))
