"""Linear layers on preshuffled weights: the order that aiter's fastest GEMMs read, kept in a type of ours.

aiter marks such a tensor with an attribute, which copies drop and in-place loading wrongly keeps; either way the
numbers are wrong in silence. So the order is in the type, and the attribute is put on a fresh view for each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.errors import OptionError
from hf_rocm.ops.aiter import linear as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.linear import LinearSpec, aiter_refuses, specification
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route

# Tiles of 16 rows by 32 columns, each stored as runs of 8 columns (16 bytes): run by run, all 16 rows of it.
ROWS, COLUMNS, RUN = 16, 32, 8


@dataclass(frozen=True, eq=False)
class Shuffled:
    """A weight [N, K] in aiter's order. data has the same shape and dtype; only `plain` gives its rows a meaning."""

    data: Tensor

    def plain(self) -> Tensor:
        """The weight itself, as a new tensor."""
        return unshuffle(self.data)


def shuffle(weight: Tensor) -> Shuffled:
    """Bring a weight [N, K] of a 16-bit dtype into aiter's order, as a copy.

    Raises `OptionError` unless N is a multiple of 16 and K of 32.
    """
    n, k = weight.shape
    if weight.element_size() != 2 or n % ROWS or k % COLUMNS:
        raise OptionError(
            "this weight can't be shuffled",
            facts={"expected": "16-bit, N a multiple of 16, K of 32", "found": f"{weight.dtype}, {n} × {k}"},
        )
    tiles = weight.reshape(n // ROWS, ROWS, k // COLUMNS, COLUMNS // RUN, RUN)
    return Shuffled(tiles.permute(0, 2, 3, 1, 4).reshape(n, k))


def unshuffle(data: Tensor) -> Tensor:
    """The inverse of `shuffle`, on the bare tensor."""
    n, k = data.shape
    tiles = data.reshape(n // ROWS, k // COLUMNS, COLUMNS // RUN, ROWS, RUN)
    return tiles.permute(0, 3, 1, 2, 4).reshape(n, k)


def shuffled_linear(x: Tensor, weight: Shuffled, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for a shuffled W. x: [..., K] bf16 or fp16; bias: [N] or None. Returns [..., N]."""
    data = weight.data
    result: Tensor = route(_operation, specification(x, data, bias), x, data)(x, data, bias)
    return result


def shuffled_refuses(weight: Tensor, bias: Tensor | None) -> str | None:
    """Why no kernel would read a shuffled copy of this weight [N, K] here, in a sentence, or None. Copies nothing."""
    n, k = weight.shape
    if weight.element_size() != 2 or not weight.is_floating_point():
        return f"only fp16 and bf16 are shuffled, not {weight.dtype}"
    if n % ROWS or k % COLUMNS:
        return f"N must be a multiple of {ROWS} and K of {COLUMNS}, got {n} × {k}"
    if bias is not None and bias.dtype != weight.dtype:
        return f"the weight is {weight.dtype} and the bias {bias.dtype}"
    with torch.no_grad():
        key = specification(weight, weight, bias)
    return aiter_refuses(_operation.choose(key))


def torch_shuffled_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """Right, not fast: the weight is put in order at every call."""
    return F.linear(x, unshuffle(data), bias)


def eager_shuffled_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """The oracle."""
    product = torch.matmul(x, unshuffle(data).t())
    return product if bias is None else product + bias


_operation = Operation("shuffled_linear", LinearSpec, family="linear")
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
