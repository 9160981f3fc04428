"""4-bit weights with one scale per group: `int4` in groups of 128, `int4-g64` and `int4-g32` in smaller groups.

Weights from checkpoints may also have zero points, inputs in another order, a code (a table of the 16 numbers) and
quantised scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.ops.four_bit import GROUPS, INT4, PER_WORD, SCALE, Nested, dequantize_groups, quantize_groups
from hf_rocm.weights.encoding import QuantizedWeight, encoding

_GROUP_OF = {"int4" if group == max(GROUPS) else f"int4-g{group}": group for group in sorted(GROUPS, reverse=True)}


@encoding(*_GROUP_OF)
class FourBitWeight(QuantizedWeight):
    """data: [N, K / 8] int32, see `ops.four_bit`; scale: [N, K / group], bf16 if hf_rocm quantised the weight.

    zeros: [N, K / group] uint8, the zero points, or None. code: the name of the table with the 16 numbers, or None.
    nested: the tensors that decode scales in uint8 (see `ops.four_bit.Nested`), or None.
    """

    nested_code: Tensor | None
    nested_factors: Tensor | None

    def __init__(
        self,
        data: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
        code: str | None = None,
        nested: Nested | None = None,
    ) -> None:
        super().__init__(data, scale, bias)
        self.zeros, self.order, self.code = zeros, order, code
        for name, tensor in zip(Nested._fields, nested or (None, None), strict=True):
            self.register_buffer(f"nested_{name}", tensor, persistent=False)

    def nested_of(self, rows: slice) -> Nested | None:
        """The code and factors that decode the scales of these rows, or None."""
        # This is faster than attribute access on a module.
        buffers: Any = self._buffers
        code, factors = buffers["nested_code"], buffers["nested_factors"]
        if code is None or factors is None:
            return None
        return Nested(code, factors).of_rows(rows, buffers["scale"].shape[1])

    @classmethod
    def format_for(cls, model: nn.Module, kind: str) -> int:
        return _GROUP_OF[kind]

    @classmethod
    def described(cls, format: int) -> str:
        return f"4 bits in groups of {format}"

    @classmethod
    def refuses(cls, weight: Tensor, format: int) -> str | None:
        k = weight.shape[1]
        return None if k % format == 0 else f"its number of inputs, {k}, is not a multiple of the group size {format}"

    @classmethod
    def empty(cls, n: int, weight: Tensor, format: int, bias: Tensor | None) -> FourBitWeight:
        k, device = weight.shape[1], weight.device
        words = torch.empty((n, k // PER_WORD), dtype=INT4, device=device)
        return cls(words, torch.empty((n, k // format), dtype=SCALE, device=device), bias)

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows = slice(start, stop)
        zeros = None if self.zeros is None else self.zeros[rows]
        weight = dequantize_groups(
            self.data[rows], self.scale[rows], dtype, zeros, code=self.code, nested=self.nested_of(rows)
        )
        return weight if self.order is None else weight[:, self.order.argsort()]

    def forward(self, x: Tensor, *rows: Any, **parts: Any) -> Tensor:
        if self.code is not None:
            parts["code"], parts["nested"] = self.code, self.nested_of(slice(*rows or (None,)))
        return super().forward(x, *rows, **parts)

    def _encode(self, place: slice, part: Tensor) -> None:
        group = part.shape[1] // self.scale.shape[1]
        self.data[place], self.scale[place] = quantize_groups(part, group)
