"""The specifications of `quantized_linear` and `round_rows`, and the arguments of `quantized_linear`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.ops.eight_bit import BLOCK, dequantize_blocks, dequantize_rows, unshuffle_rows
from hf_rocm.ops.four_bit import INT4, Nested, dequantize_groups
from hf_rocm.ops.specs.linear import MANY

# A weight is dequantised in pieces. Every piece but the last has a multiple of this number of rows, so that it does not
# end within the 128 rows of a block, or within 256 scales that share a factor.
_STEP = 256
# The largest number of elements in a piece (64 MiB in fp32), unless `_STEP` rows have more.
_AT_ONCE = 2**24


class QuantizedSpec(NamedTuple):
    """The specification of `quantized_linear`. k, n: a GEMM of [M, K] by [N, K]ᵀ."""

    # The dtype of x.
    dtype: torch.dtype
    # The dtype of the weight.
    format: torch.dtype
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    shuffled: bool
    round_input: bool = True
    # 4-bit weights: how many numbers of a row share a scale. 8-bit weights: the number of rows and of columns of a
    # block, or 0 if a row has one scale
    group: int = 0
    norm_dtype: torch.dtype | None = None
    one_plus: bool = False
    activation: str | None = None
    residual: bool = False
    # M rounded up to a power of two, or MANY; MANY if x is rounded.
    rows: int = MANY
    # The dtype of the groups' scales; None: bf16.
    scale_dtype: torch.dtype | None = None
    # Whether groups have zero points.
    zeros: bool = False
    # The table of 4-bit numbers, see `ops.four_bit`; None: integers.
    code: str | None = None
    # Whether the columns of x are reordered.
    order: bool = False

    @property
    def grad(self) -> bool:
        """False: quantised layers have no gradient (see `quantized_linear`)."""
        return False


class RoundingSpec(NamedTuple):
    """The specification of `round_rows`. dim: K of x [M, K]."""

    dtype: torch.dtype
    format: torch.dtype
    device: torch.device
    dim: int

    @property
    def grad(self) -> bool:
        """False: the rounding of a quantised layer has no gradient."""
        return False


class QuantizedCall(NamedTuple):
    """The arguments of `quantized_linear` as its implementations take them, and the format of the weight."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    format: torch.dtype
    shuffled: bool
    round_input: bool = True
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    eps: float = 0.0
    one_plus: bool = False
    activation: str | None = None
    zeros: Tensor | None = None
    code: str | None = None
    nested: Nested | None = None
    order: Tensor | None = None

    def plain_weight(self) -> Tensor:
        """The 8-bit weight in its plain order."""
        return unshuffle_rows(self.weight) if self.shuffled else self.weight

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in this dtype."""
        weight = self.weight if self.format == INT4 else self.plain_weight()
        step = max(1, _AT_ONCE // max(1, self.x.shape[-1]) // _STEP) * _STEP
        parts = [
            self._decoded(weight[start : start + step], slice(start, start + step), dtype)
            for start in range(0, max(1, len(weight)), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decoded(self, rows: Tensor, place: slice, dtype: torch.dtype) -> Tensor:
        if self.format != INT4 and self.scale.dim() == 2:
            return dequantize_blocks(rows, self.scale[place.start // BLOCK : place.stop // BLOCK], dtype)
        if self.format != INT4:
            return dequantize_rows(rows, self.scale[place], dtype)
        zeros, nested = None if self.zeros is None else self.zeros[place], self.nested
        if nested is not None:
            nested = nested.of_rows(place, self.scale.shape[1])
        return dequantize_groups(rows, self.scale[place], dtype, zeros, self.code, nested)
