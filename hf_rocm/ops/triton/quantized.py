"""GEMMs with 8- or 4-bit weights; x is not rounded.

For few rows, the weight is converted in registers. For more rows, it is dequantised in one pass into a temporary
tensor, and the BLAS library computes the GEMM. `tiles` documents which tiles were measured on one NVIDIA GPU and which
are estimates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import describe
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.eight_bit import BLOCK, FP8, FP8_FNUZ
from hf_rocm.ops.fakes import like
from hf_rocm.ops.four_bit import INT4, PER_WORD, SIGNED, kernel_groups, run_length, table_bytes
from hf_rocm.ops.triton import detect, linear, norm
from hf_rocm.ops.triton.launch import cached, form, forms_of, launch, units, warps
from hf_rocm.ops.triton.tiles import ROWS, dequantize_tile, eight_bit_tile, four_bit_tile, reorder_tile

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.quantized import QuantizedCall, QuantizedSpec, RoundingSpec

NAME = "few_rows"
DEQUANTIZE = "dequantize, F.linear"

# The smallest K of a matrix instruction.
_SHORTEST_RUN = 16
# The largest number of columns of an 8-bit W that `few_rows` processes at a time.
_EVEN = 512
# The number of columns that a program of `sum_parts` computes.
_SUMMED = 512
# With longer groups, the kernel for several rows may need too much shared memory.
_LONGEST_CODED = 256
# BYTES → pattern, see `four_bit_vector`
_PATTERNS = {False: 0x3F800000, True: 0x0F0F0F0F}


def refuses(spec: QuantizedSpec, device: Device) -> str | None:
    """Why the kernels can't serve this GEMM, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.round_input:
        return "the kernels for few rows don't round x"
    if not spec.rows:
        return "M > 64 is left to the BLAS library, with a dequantised weight"
    if spec.dtype not in linear.DTYPES:
        return f"the kernels for few rows support bf16 and fp16, not {spec.dtype}"
    if spec.bias_dtype not in (None, spec.dtype):
        return f"the kernels need one dtype, got {spec.dtype} and a bias of {spec.bias_dtype}"
    if spec.shuffled:
        return "the kernels read weights in plain order, but this weight is shuffled"
    if spec.n < linear.FEWEST or spec.k < linear.FEWEST:
        return f"N and K must be at least {linear.FEWEST}, got {spec.n} and {spec.k}"
    if spec.format == INT4 and run_length(spec.k, spec.group) < _SHORTEST_RUN:
        return f"with 4 bits, K must be a multiple of {PER_WORD * _SHORTEST_RUN}, got {spec.k}"
    if spec.code is not None and spec.rows != 1 and spec.group > _LONGEST_CODED:
        return f"for several rows, groups of {spec.code} may have at most {_LONGEST_CODED} numbers, got {spec.group}"
    rdna3 = (device.arch or "").startswith("gfx11")
    if rdna3 and spec.format in (FP8, FP8_FNUZ) and spec.residual and spec.rows > ROWS and spec.k % _EVEN:
        reason = "on RDNA 3, a wait is missing from the machine code of the fp8 kernel with a residual sum"
        return f"{reason} for M > {ROWS}, unless K is a multiple of {_EVEN}, got {spec.k}"
    # Whether there is a gate, or scales are applied within the loop over K.
    more = spec.activation is not None or spec.group
    if more and spec.format != INT4 and rdna3:
        return "on RDNA 3, a wait is missing from the machine code of the 8-bit kernels with a gate or block scales"
    if spec.activation is not None and spec.format != INT4 and spec.group and spec.n % (2 * BLOCK):
        return f"with a scale for each block, a gate needs N to be a multiple of {2 * BLOCK}, got {spec.n}"
    return format_refuses(spec, device) or linear.parts_refuse(spec)


def dequantize_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    """Why the kernels that dequantise can't serve this GEMM, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.round_input:
        return "the call rounds x"
    if spec.rows:
        return "M ≤ 64 is left to the kernels for few rows"
    # fp32 GEMMs of the BLAS library differ by more than the check allows.
    if spec.dtype not in linear.DTYPES:
        return f"the kernels dequantise to bf16 and fp16, not {spec.dtype}"
    if spec.shuffled:
        return "the kernels read weights in plain order, but this weight is shuffled"
    return format_refuses(spec, device)


def format_refuses(spec: QuantizedSpec | RoundingSpec, device: Device) -> str | None:
    """Why the device can't convert numbers of this format, or None."""
    if device.rocm or device.kind == "cpu" or spec.format not in (FP8, FP8_FNUZ):
        return None
    if spec.format == FP8_FNUZ:
        return "NVIDIA GPUs do not support the FNUZ formats of fp8"
    major, minor = torch.cuda.get_device_capability(spec.device)
    return None if (major, minor) >= (8, 9) else f"fp8 needs compute capability 8.9 or higher, got {major}.{minor}"


def quantized_linear(call: QuantizedCall) -> Tensor:
    """See `hf_rocm.ops.quantized_linear`."""
    result: Tensor = _traced(
        call.x,
        call.weight,
        call.scale,
        call.bias,
        call.norm_weight,
        call.residual,
        call.eps,
        call.one_plus,
        call.zeros,
        call.code,
        *(call.nested or (None, None)),
        call.order,
        call.activation,
    )
    return result


def _forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    one_plus: bool,
    zeros: Tensor | None,
    code: str | None,
    nested_code: Tensor | None,
    nested_factors: Tensor | None,
    order: Tensor | None,
    activation: str | None,
) -> Tensor:
    out = linear.empty_output(x, weight, scale, bias, norm_weight, residual, activation)
    n, k = out.shape[-1], x.shape[-1]
    m = out.numel() // n
    if m == 0:
        return out
    if residual is not None:
        residual = residual.contiguous()
    # A separate kernel for the norm is faster, because converting W takes arithmetic too.
    if norm_weight is not None and order is not None:
        x = norm.reordered_rms_norm(x, norm_weight, eps, one_plus, order)
    elif norm_weight is not None:
        x = norm.rms_norm(x, norm_weight, eps, one_plus)
    elif order is not None:
        x = _reorder(x, order)
    from hf_rocm.ops.triton.kernels import linear as kernels

    device, gated = describe(x.device), activation is not None
    tables: tuple[Tensor | None, ...]
    sizes: tuple[Any, ...]
    tile: Any
    constants: dict[str, Any]
    if weight.dtype == INT4:
        from hf_rocm.ops.triton.kernels import four_bit, four_bit_matrix

        group = k // scale.shape[1]
        run = run_length(k, group)
        target: dict[str, Any] = {"rocm": device.rocm, "arch": device.arch, "units": units(x.device)}
        coded = code is not None
        scales: dict[str, Any] = {"scale_bytes": scale.element_size(), "nested": nested_code is not None}
        tile = four_bit_tile(m, n, gated, run, table=coded, **scales, **target)
        kernel = four_bit_matrix.four_bit_rows if tile.matrix else four_bit.four_bit_vector
        # without matrix instructions, fp16 numbers are converted to fp32 before they are multiplied
        numbers = _table(code, x.dtype if tile.matrix else torch.float16, x.device)
        together = PER_WORD * run // group
        scale, zeros = _aligned(scale, together), None if zeros is None else _aligned(zeros, together)
        tables = (zeros, numbers, nested_code, nested_factors)
        sizes = (m, n, k // PER_WORD, _PATTERNS[device.rocm])
        group, step = kernel_groups(k, group)
        even = k % (PER_WORD * run * tile.blocks) == 0
        constants = _constants(code, device)
        constants |= {"EVEN": even, "GROUP": group, "STEP": step, "RUN": run}
        constants |= {"SUBTRACTS": not device.rocm} if tile.matrix else {"BYTES": device.rocm}
    else:
        tile = eight_bit_tile(m, n, gated, rocm=device.rocm, units=units(x.device))
        kernel = kernels.few_rows if tile.matrix else kernels.matrix_vector
        before, further = linear.norm_arguments(tile)
        tables, sizes = (), (m, n, k, *before)
        even = k % (tile.splits * tile.k) == 0
        constants = {"EVEN": even, "GROUP": _block(scale.dim()), "SELECT": _select(device), **further}
    parts = out if tile.parts == 1 else out.new_empty((tile.parts, m, n), dtype=torch.float32)
    launch(
        kernel,
        (-(-n // tile.n), -(-m // tile.m), tile.parts),
        (x.contiguous(), weight, scale, *tables, bias, residual, parts, *sizes),
        {"ACTIVATION": activation, **constants, **tile.constants()},
        num_warps=warps(tile.threads, x.device),
        num_stages=tile.stages,
    )
    if parts is not out:
        column_scale = None if scale.dim() == 2 else scale
        launch(
            kernels.sum_parts,
            (-(-n // _SUMMED), m),
            (parts, column_scale, bias, residual, out, m, n),
            {"PARTS": tile.parts, "BLOCK": _SUMMED},
            num_warps=4,
        )
    return out


_traced = opaque(
    "triton_quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? norm_weight, "
    "Tensor? residual, float eps, bool one_plus, Tensor? zeros, str? code, Tensor? nested_code, "
    "Tensor? nested_factors, Tensor? order, str? activation) -> Tensor",
    _forward,
    linear.empty_output,
)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    out = like(x)
    k = x.shape[-1]
    m = out.numel() // k if k else 0
    if m:
        from hf_rocm.ops.triton.kernels.reorder import reorder_kernel

        x = x.contiguous()
        block, threads = reorder_tile(m)
        forms = forms_of(x, order, out), form(k)
        grid, num_warps = (m, -(-k // block)), warps(threads, x.device)
        launch(reorder_kernel, grid, (x, order, out, k), {"BLOCK": block}, num_warps=num_warps, forms=forms)
    return out


# x.index_select(-1, order)
reorder = opaque("triton_reorder(Tensor x, Tensor order) -> Tensor", _reorder, like)


def dequantized_linear(call: QuantizedCall) -> Tensor:
    """The GEMM and the bias of `hf_rocm.ops.quantized_linear`, with the columns of x in the order of the weight."""
    x, bias = call.x, call.bias
    if call.order is not None:
        x = reorder(x, call.order)
    weight = _dequantized(call.weight, call.scale, x.dtype, call.zeros, call.code, *(call.nested or (None, None)))
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _dequantize(
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    zeros: Tensor | None = None,
    code: str | None = None,
    nested_code: Tensor | None = None,
    nested_factors: Tensor | None = None,
) -> Tensor:
    out = _plain(weight, scale, dtype)
    if out.numel() == 0:
        return out
    kernel, grid, constants, num_warps = _work(weight.shape, scale.shape, weight.dtype, code, weight.device)
    tables: tuple[Tensor | None, ...] = ()
    if weight.dtype == INT4:
        tables = (zeros, _table(code, torch.float32, weight.device), nested_code, nested_factors)
    weight, scale, words = weight.contiguous(), scale.contiguous(), weight.shape[1]
    launch(
        kernel,
        grid,
        (weight, scale, *tables, out, words),
        constants,
        num_warps=num_warps,
        forms=(forms_of(weight, scale, *tables, out), form(words)),
    )
    return out


@cached
def _work(
    shape: torch.Size, scale_shape: torch.Size, format: torch.dtype, code: str | None, device: torch.device
) -> tuple[Any, tuple[int, int], dict[str, Any], int]:
    """(kernel, grid, constants, warps) of the launch that dequantises a weight of this shape and format."""
    from hf_rocm.ops.triton.kernels import dequantize as kernels

    n, k = shape
    constants: dict[str, Any]
    if format == INT4:
        k *= PER_WORD
        group = k // scale_shape[1]
        run = run_length(k, group)
        size, threads = dequantize_tile(k, run)
        group, step = kernel_groups(k, group)
        constants = _constants(code, describe(device))
        constants |= {"GROUP": group, "STEP": step, "RUN": run, "BLOCKS": size}
        return kernels.dequantize_four, (n, -(-k // (8 * run * size))), constants, warps(threads, device)
    group = _block(len(scale_shape))
    size, threads = dequantize_tile(k, 0)
    size = max(size, group)
    constants = {"GROUP": group, "SELECT": _select(describe(device)), "BLOCK": size}
    return kernels.dequantize_eight, (n, -(-k // size)), constants, warps(threads, device)


def _table(code: str | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The argument `table` of the 4-bit kernels."""
    return None if code is None else table_bytes(code, dtype, device)


def _constants(code: str | None, device: Device) -> dict[str, Any]:
    """The constants SIGNED and SELECT of the 4-bit kernels."""
    return {"SIGNED": code in SIGNED, "SELECT": _select(device)}


def _aligned(numbers: Tensor, together: int) -> Tensor:
    """The same tensor, copied unless the kernels can load this many adjacent numbers, up to 8 bytes, at once."""
    size = min(8, max(1, together) * numbers.element_size())
    return numbers.clone() if numbers.data_ptr() % size else numbers


def _select(device: Device) -> str | None:
    """The instruction that selects bytes; None on a CPU."""
    from hf_rocm.ops.triton.kernels import codes

    if device.rocm:
        return codes.AMD
    return None if device.kind == "cpu" else codes.NVIDIA


def _block(scale_dims: int) -> int:
    """The number of rows and of columns of an 8-bit weight that share a scale; 0 if there is one scale per row."""
    return BLOCK if scale_dims == 2 else 0


def _plain(weight: Tensor, scale: Tensor, dtype: torch.dtype, *more: Any) -> Tensor:
    n, k = weight.shape
    return weight.new_empty((n, k * PER_WORD if weight.dtype == INT4 else k), dtype=dtype)


_dequantized = opaque(
    "triton_dequantize(Tensor weight, Tensor scale, ScalarType dtype, Tensor? zeros=None, str? code=None, "
    "Tensor? nested_code=None, Tensor? nested_factors=None) -> Tensor",
    _dequantize,
    _plain,
)
