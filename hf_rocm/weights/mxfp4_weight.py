"""Weights in MXFP4, kind `mxfp4`: 4-bit floats in blocks of 32 that share a power of two.

`quantize` rounds to nearest; the values of an MXFP4 checkpoint are loaded as stored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_rocm.ops.four_bit import E2M1, INT4, PER_WORD, packed, run_length
from hf_rocm.ops.mxfp4 import BLOCK, MXFP4, quantize
from hf_rocm.weights.encoding import encoding
from hf_rocm.weights.four_bit import FourBitWeight
from hf_rocm.weights.quantized_experts import QuantizedExperts


@encoding("mxfp4")
class Mxfp4Weight(FourBitWeight):
    """data: [N, K / 8] int32 in the order of `ops.four_bit`; scale: [N, K / 32] uint8, see `ops.mxfp4`."""

    experts = QuantizedExperts

    @classmethod
    def format_for(cls, model: nn.Module, kind: str) -> int:
        return BLOCK

    @classmethod
    def described(cls, format: int) -> str:
        return f"e2m1 in blocks of {format}"

    @classmethod
    def empty(cls, n: int, weight: Tensor, format: int, bias: Tensor | None) -> Mxfp4Weight:
        k, device = weight.shape[1], weight.device
        words = torch.empty((n, k // PER_WORD), dtype=INT4, device=device)
        return cls(words, torch.empty((n, k // format), dtype=MXFP4, device=device), bias, code=E2M1)

    def _encode(self, place: slice, part: Tensor) -> None:
        codes, self.scale[place] = quantize(part)
        self.data[place] = packed(codes.to(INT4), run_length(part.shape[1], BLOCK))
