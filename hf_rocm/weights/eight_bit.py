"""8-bit weights, `fp8` and `int8`, with one scale per row, or per block as in some checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.device import describe, is_rocm
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.eight_bit import (
    BLOCK,
    FP8,
    INT8,
    dequantize_blocks,
    dequantize_rows,
    fp8_of,
    quantize_rows,
    shuffle_rows,
    unshuffle_rows,
)
from hf_rocm.ops.quantized import choose, shuffle_refuses
from hf_rocm.ops.specs.quantized import QuantizedSpec
from hf_rocm.weights.encoding import QuantizedWeight, encoding


@encoding("fp8", "int8")
class EightBitWeight(QuantizedWeight):
    """data: [N, K] int8 or fp8, shuffled for aiter or not; scale: [N] fp32, or [⌈N / 128⌉, ⌈K / 128⌉] for blocks.

    weight_only: whether x is never rounded, as is the case for blocks.
    """

    # A shuffled tile has 16 rows.
    step = 16

    def __init__(self, data: Tensor, scale: Tensor, bias: Tensor | None, *, weight_only: bool = False) -> None:
        super().__init__(data, scale, bias)
        self.weight_only = weight_only or scale.dim() == 2
        self.per_scale = BLOCK if scale.dim() == 2 else 1
        self._choose()

    def _choose(self) -> None:
        """Set `rounds`, whether x is rounded: for int8 and the device's own fp8 format, unless `weight_only`."""
        format = self.data.dtype
        self.rounds = not self.weight_only and (format == INT8 or fp8_of(describe(self.data.device)) == format)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EightBitWeight:
        super()._apply(fn, recurse)
        self._choose()
        return self

    @classmethod
    def format_for(cls, model: nn.Module, kind: str) -> torch.dtype:
        if kind == "int8":
            return INT8
        device = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
        if device is None and is_rocm() and torch.cuda.is_available():
            # The likely target of a model on the CPU.
            device = torch.device("cuda", torch.cuda.current_device())
        return fp8_of(describe(device or torch.device("cpu"))) or FP8

    @classmethod
    def described(cls, format: torch.dtype) -> str:
        return str(format).removeprefix("torch.")

    @classmethod
    def empty(cls, n: int, weight: Tensor, format: torch.dtype, bias: Tensor | None) -> EightBitWeight:
        data = torch.empty((n, weight.shape[1]), dtype=format, device=weight.device)
        return cls(data, torch.empty(n, dtype=torch.float32, device=weight.device), bias)

    def written(self, dtype: torch.dtype) -> None:
        if self._is_better_shuffled(dtype):
            self.data = shuffle_rows(self.data)
            self.shuffled = True

    def _is_better_shuffled(self, dtype: torch.dtype) -> bool:
        """Return whether aiter's GEMM on shuffled weights would be selected. It rounds x, so it requires `rounds`."""
        if not self.rounds:
            return False
        device = describe(self.data.device)
        bias_dtype = None if self.bias is None else self.bias.dtype
        n, k = self.data.shape
        spec = QuantizedSpec(dtype, self.data.dtype, self.data.device, n, k, bias_dtype, True)
        if not device.rocm or shuffle_refuses(spec, device) is not None:
            return False
        try:
            return choose(spec)[0] == "aiter"
        except TierUnavailable:
            return False

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        dequantize = dequantize_rows if self.scale.dim() == 1 else dequantize_blocks
        return dequantize(self.rows(start, stop), self.scale[self.scales_of(start, stop)], dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return these rows in plain order, as a view if the data is in plain order."""
        rows = self.data[start:stop]
        return unshuffle_rows(rows) if self.shuffled else rows

    def put(self, start: int, rows: Tensor) -> None:
        """Write encoded rows [N_i, K], beginning at row `start`."""
        self.data[start : start + len(rows)] = shuffle_rows(rows) if self.shuffled else rows

    def _encode(self, place: slice, part: Tensor) -> None:
        rows, scale = quantize_rows(part, self.data.dtype)
        self.put(place.start, rows)
        self.scale[place] = scale.flatten()

    def __getstate__(self) -> dict[str, Any]:
        # plain pickle does not support fp8
        buffers = {**self._buffers, "data": self.data.view(torch.int8)}
        return {**self.__dict__, "_buffers": buffers, "format": self.data.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        format = state.pop("format")
        super().__setstate__(state)
        self._buffers["data"] = self.data.view(format)
        self._choose()
