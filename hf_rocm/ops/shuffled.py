"""Linear layers with preshuffled weights, in the order that aiter's fastest GEMMs read.

aiter marks a preshuffled tensor with an attribute. Copies lose the attribute, and loading in place wrongly keeps it; in
both cases the results are silently wrong. So the order is part of the type `Shuffled` here, and the attribute is set on
a new view for every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, compiler

from hf_rocm.errors import OptionError
from hf_rocm.ops.aiter import linear as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.aiter.layout import COLUMNS, ROWS, shuffle_tiles, unshuffle_tiles
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.linear import aiter_refuses, cases, kind, specification
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.linear import LinearSpec

# Adjacent 16-bit elements of a row that are stored together.
RUN = 8


@dataclass(frozen=True, eq=False)
class Shuffled:
    """A weight [N, K], or stacked weights [E, N, K], in aiter's order. data: the same elements in that order."""

    data: Tensor

    def plain(self) -> Tensor:
        """The weight [N, K] in its plain order, as a new tensor. Stacked weights are not supported."""
        return unshuffle(self.data)


def shuffle(weight: Tensor) -> Shuffled:
    """Copy a weight [N, K] of a 16-bit dtype into aiter's order.

    Raises `OptionError` unless the dtype has 16 bits, N is a multiple of 16 and K is a multiple of 32.
    """
    n, k = weight.shape
    if weight.element_size() != 2 or n % ROWS or k % COLUMNS:
        raise OptionError(
            "this weight can't be shuffled",
            facts={"expected": "16-bit, N a multiple of 16, K a multiple of 32", "found": f"{weight.dtype}, {n} × {k}"},
        )
    return Shuffled(shuffle_tiles(weight, RUN))


def unshuffle(data: Tensor) -> Tensor:
    """The inverse of `shuffle`, for the tensor [N, K] in `Shuffled.data`."""
    return unshuffle_tiles(data, RUN)


def shuffled_linear(x: Tensor, weight: Shuffled, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for a shuffled W. x: [..., K] bf16 or fp16; bias: [N] or None. Returns [..., N]."""
    data = weight.data
    spec = specification(x, data, bias)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(x, data, bias)
    return result


def shuffled_refuses(weight: Tensor, bias: Tensor | None) -> str | None:
    """Why no kernel uses a shuffled copy of this weight [N, K] on its device, or None. Does not copy the weight."""
    n, k = weight.shape
    if weight.element_size() != 2 or not weight.is_floating_point():
        return f"only fp16 and bf16 weights can be shuffled, not {weight.dtype}"
    if n % ROWS or k % COLUMNS:
        return f"N must be a multiple of {ROWS} and K of {COLUMNS}, got {n} × {k}"
    if bias is not None and bias.dtype != weight.dtype:
        return f"the weight is {weight.dtype} and the bias {bias.dtype}"
    with torch.no_grad():
        spec = specification(weight, weight, bias)
    return aiter_refuses(_operation.choose(spec))


def torch_shuffled_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """Correct but slow: unshuffles the weight at every call."""
    return F.linear(x, unshuffle(data), bias)


def eager_shuffled_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """The oracle: a GEMM with the unshuffled weight, then the addition of the bias."""
    output = torch.matmul(x, unshuffle(data).t())
    return output if bias is None else output + bias


def _cases(spec: LinearSpec) -> Iterator[Case]:
    for case in cases(spec.dtype, spec.device, spec.n, spec.k, bias=spec.bias_dtype is not None, rows=spec.rows):
        x, weight, bias = case.tensors
        assert weight is not None
        yield Case((x, shuffle(weight).data, bias))


_operation = Operation("shuffled_linear", LinearSpec, _cases, kind, family="linear")
_operation.register(
    Implementation(
        "aiter",
        "gemm_a16w16, shuffled",
        aiter.shuffled_refuses,
        aiter.shuffled_linear,
        checked("shuffled_linear", "gemm_a16w16, shuffled"),
    )
)
_operation.register(Implementation("torch", "unshuffle, F.linear", refuses_nothing, torch_shuffled_linear))
_operation.register(Implementation("eager", "unshuffle, matmul", refuses_nothing, eager_shuffled_linear))
