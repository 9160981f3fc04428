"""The 8-bit GEMMs of this PyTorch release on this CPU: private functions, which differ by release and CPU.

The functions are called directly, without the package, so that expected routes don't depend on the package's choice.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hf_rocm.ops.eight_bit import FP8, FP8_FNUZ, INT8, quantize_rows
from hf_rocm.ops.quantized import choose
from hf_rocm.ops.specs.quantized import QuantizedSpec

# The names of the 8-bit GEMMs in the torch tier, and of the fallback
SCALED_MM, SCALED_AFTER, INT_MM, EAGER = "_scaled_mm", "_scaled_mm, scaled after", "_int_mm", "dequantize, matmul"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FORMATS = (INT8, FP8, FP8_FNUZ)
SIZES = ((33, 64, 128), (1, 5, 63))  # M, N, K


def rounding_error(x: Tensor, format: torch.dtype) -> Tensor:
    """The largest error that `quantize_rows` may make in an element of x. x: [..., K]. Returns [..., K] in fp64.

    The error is at most half a step. An int8 step is one scale. An fp8 number has 3 bits after the leading one, so half
    a step is at most 2⁻⁴ of the number itself or half of the smallest step (2⁻¹⁰ of the scale, 2⁻¹¹ on MI300),
    whichever is larger.
    """
    scale = quantize_rows(x.double(), format)[1]
    if format == INT8:
        return (scale / 2).expand(x.shape)
    half_a_step = torch.finfo(format).smallest_normal / 2**4
    return torch.maximum(x.double().abs() / 2**4, half_a_step * scale)


def gemm_name(format: torch.dtype, dtype: torch.dtype) -> str | None:
    """The name of the torch tier's first 8-bit GEMM whose results are correct on this CPU, or None if there is none."""
    names = [INT_MM] if format == INT8 else [SCALED_MM, SCALED_AFTER] if dtype == torch.bfloat16 else [SCALED_AFTER]
    return next((name for name in names if _multiplies(name, format)), None)


def served_by(format: torch.dtype, dtype: torch.dtype) -> str:
    """The name of the implementation that must be selected on a CPU."""
    return gemm_name(format, dtype) or EAGER


def _multiplies(name: str, format: torch.dtype) -> bool:
    for m, n, k in SIZES:
        rows, weight = _numbers(format, m, k), _numbers(format, n, k)
        try:
            actual = _call(name, rows, weight.t())
        except RuntimeError:
            # This release of PyTorch or its library does not support the format on this CPU.
            return False
        exact = rows.double() @ weight.double().t()
        rounding = 0 if format == INT8 else torch.finfo(actual.dtype).eps + k * torch.finfo(torch.float32).eps
        bound = rounding * (rows.double().abs() @ weight.double().abs().t())
        if not ((actual.double() - exact).abs() <= bound).all():
            return False
    return True


def _call(name: str, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if name == INT_MM:
        return torch._int_mm(rows, weight)
    if name == SCALED_AFTER:
        one = torch.ones(())
        return torch._scaled_mm(rows, weight, scale_a=one, scale_b=one, out_dtype=torch.float32)
    ones = {"scale_a": torch.ones(rows.shape[0], 1), "scale_b": torch.ones(1, weight.shape[1])}
    return torch._scaled_mm(rows, weight, **ones, out_dtype=torch.bfloat16)


def _numbers(format: torch.dtype, *shape: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (drawn * 40).clamp(-127, 127).to(format)


def check_all() -> None:
    """Select an implementation for every format, dtype and size now, so that a failed check does not warn in a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for format in FORMATS:
            for dtype in DTYPES:
                for _, n, k in SIZES:
                    choose(
                        QuantizedSpec(
                            dtype=dtype,
                            format=format,
                            device=torch.device("cpu"),
                            n=n,
                            k=k,
                            bias_dtype=None,
                            shuffled=False,
                        )
                    )
