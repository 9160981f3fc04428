"""quantized_linear: x Wᵀ + b with 8- or 4-bit weights, with the norm before it, and the gate and residual sum after it.

8-bit weights have one scale per row or block, and 4-bit weights have one per group of a row. If x has few rows and a
kernel can read the stored weight, x is not rounded. Otherwise the weight is dequantised, or x is rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, compiler

from hf_rocm.device import Device
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import probe, quantized_torch
from hf_rocm.ops.aiter import quantized as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.eight_bit import BLOCK, INT8, quantize_blocks, quantize_rows, shuffle_rows
from hf_rocm.ops.four_bit import E2M1, INT4, PER_FACTOR, PER_WORD, SCALE, Nested, quantize_groups
from hf_rocm.ops.linear import ACTIVATIONS
from hf_rocm.ops.pointwise import eager_act_and_mul, eager_rms_norm
from hf_rocm.ops.probe_cases import Draw, fewer_rows, smaller
from hf_rocm.ops.quantized_torch import one_by_one
from hf_rocm.ops.registry import Case, Implementation, Operation, chosen_elsewhere, refuses_nothing
from hf_rocm.ops.specs.linear import MANY
from hf_rocm.ops.specs.pointwise import Norm
from hf_rocm.ops.specs.quantized import QuantizedCall, QuantizedSpec
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import quantized as triton

# The largest M for which a kernel converts the weight in registers.
FEW = 64
# The smallest M for which fp8 GEMMs with rounded rows are preferred. An estimate: on one NVIDIA H200 they were slower
# than bf16 for 1024 rows, and faster for 8192.
ROUNDED_FROM = 2048
# M rounded up to a power of two.
_ROWS_CLASS = tuple(1 << (m - 1).bit_length() if m else 0 for m in range(FEW + 1))


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    shuffled: bool = False,
    round_input: bool = True,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    zeros: Tensor | None = None,
    code: str | None = None,
    nested: Nested | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) (s · W)ᵀ + b, then the gate, then + residual; the norm, gate and residual only if given.

    x: [..., K] fp64, fp32, fp16 or bf16; weight: [N, K] int8 or fp8 with scale [N] fp32, or [⌈N / 128⌉, ⌈K / 128⌉] fp32
    for blocks, or [N, K / 8] int32 with scale [N, K / group] (see `four_bit.quantize_groups`); bias: [N] or None.
    shuffled: the weight is in the order of `eight_bit.shuffle_rows`. round_input: round the rows of x to the format of
    W; ignored unless W has 8 bits and one scale per row. norm, activation, residual: as in `fused_linear`. zeros, code,
    nested: the zero points of the groups, the name of the 4-bit format, and how uint8 scales are decoded; see
    `four_bit.dequantize_groups`. order: [K] int32 or int64, the column of rms_norm(x) for every column of W; None: the
    columns are in the same order.
    Returns [..., N], or [..., N / 2] with an activation, in x's dtype.
    Raises `OptionError` if gradients are enabled and x requires them, and for activations that `fused_linear` does
    not support.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise OptionError(
            "quantised layers don't support gradients, but their input requires them",
            hint="call the model under torch.no_grad(); to train, load it without quantize=",
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise OptionError(
            f"quantized_linear does not support the activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)}
        )
    norm_weight, eps, one_plus = (None, 0.0, False) if norm is None else norm
    dtype, format, device = x.dtype, weight.dtype, x.device
    n, k = weight.shape
    group = 0
    if format == INT4:
        k *= PER_WORD
        group, round_input = k // scale.shape[1], False
    elif scale.dim() == 2:
        group, round_input = BLOCK, False
    bias_dtype = None if bias is None else bias.dtype
    norm_dtype = None if norm_weight is None else norm_weight.dtype
    scale_dtype = None if format != INT4 or scale.dtype == SCALE else scale.dtype
    rows = MANY
    if not round_input:
        m = x.numel() // k if k else 0
        rows = _ROWS_CLASS[m] if m <= FEW else MANY
    spec = (
        dtype,
        format,
        device,
        n,
        k,
        bias_dtype,
        shuffled,
        round_input,
        group,
        norm_dtype,
        one_plus,
        activation,
        residual is not None,
        rows,
        scale_dtype,
        zeros is not None,
        code,
        order is not None,
    )
    call = QuantizedCall(
        x,
        weight,
        scale,
        bias,
        format,
        shuffled,
        round_input,
        norm_weight,
        residual,
        eps,
        one_plus,
        activation,
        zeros,
        code,
        nested,
        order,
    )
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(call)
    return result


def keeps_input(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, shuffled: bool) -> bool:
    """Return whether x should be used without rounding, because a Triton kernel converts the 8-bit weight.

    False if x has no rows, or while torch.compile or torch.export traces.
    """
    if compiling() or compiler._is_compiling_flag:
        return False
    n, k = weight.shape
    m = x.numel() // k if k else 0
    if m == 0:
        return False
    bias_dtype = None if bias is None else bias.dtype
    rows = _ROWS_CLASS[m] if m <= FEW else MANY
    spec = QuantizedSpec(x.dtype, weight.dtype, x.device, n, k, bias_dtype, shuffled, False, rows=rows, residual=True)
    return keeps_rows(spec, m)


def keeps_rows(spec: QuantizedSpec, m: int) -> bool:
    """Like `keeps_input`, for M rows. spec: the specification without rounding."""
    if _tier(spec) != "triton":
        return False
    if spec.rows != MANY:
        return True
    rounded = _tier(spec._replace(round_input=True))
    return rounded != "aiter" and not (rounded == "torch" and spec.format != INT8 and m >= ROUNDED_FROM)


def _tier(spec: QuantizedSpec) -> str | None:
    try:
        return _operation.choices[spec].implementation.tier
    except TierUnavailable:
        # The named tier can't serve it: a call of the operation raises an error with every reason.
        return None


def _triton_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    parts = {"rms_norm": spec.norm_dtype is not None, "act_and_mul": spec.activation is not None}
    return triton.refuses(spec, device) or chosen_elsewhere(name for name, present in parts.items() if present)


def _checked(name: str) -> probe.Probe:
    """Return a probe that checks a small GEMM: its N and K have the same remainders modulo 32 as the call's.

    PyTorch's private GEMMs differ by device and release.
    """

    check = probe.checked_here("quantized_linear", name, tier="torch")

    def small(spec: QuantizedSpec, device: Device) -> str | None:
        return check(spec._replace(n=64 + spec.n % 32, k=128 + spec.k % 32), device)

    return small


def _kind(spec: QuantizedSpec) -> QuantizedSpec:
    """Return a smaller specification that leads to the same tiles of hf_rocm's kernels.

    If x is rounded, the specification is returned unchanged.
    """
    if spec.round_input:
        return spec
    k = spec.k if spec.k <= 2048 else 1024 + spec.k % 1024
    # A row with a single group still has a single group.
    group = k if spec.group == spec.k else spec.group
    # The second half of a gated GEMM starts at a block boundary.
    blocks = group and spec.format != INT4
    return spec._replace(rows=MANY, n=smaller(spec.n, 4352, 256) if blocks else smaller(spec.n, 4160), k=k, group=group)


def _cases(spec: QuantizedSpec) -> Iterator[Case]:
    """If x has several rows, the first one is zero: its largest magnitude must not be used as a divisor."""
    n, draw = fewer_rows(spec.n, spec.k, 256), Draw(spec.dtype, spec.device)
    numbers = draw(n, spec.k) * spec.k**-0.5
    weight, scale = _encoded(numbers, spec)
    bias = None if spec.bias_dtype is None else draw(n).to(spec.bias_dtype)
    if spec.shuffled:
        weight = shuffle_rows(weight)
    nested = None
    if spec.scale_dtype == torch.uint8:
        scale, nested = (_powers_of_two(scale), None) if spec.code == E2M1 else _nested(scale)
    elif spec.scale_dtype is not None:
        scale = scale.to(spec.scale_dtype)
    zeros = (weight[:, :1] & 15).expand(scale.shape).to(torch.uint8).contiguous() if spec.zeros else None
    norm_weight = None if spec.norm_dtype is None else draw(spec.k).to(spec.norm_dtype)
    order = draw(spec.k).argsort().int() if spec.order else None
    columns = n if spec.activation is None else n // 2
    # a single row, a few rows, and more rows than the largest tile
    for m in (1, 33, 300) if spec.round_input else (1, 3, 33, 70):
        x = draw(m, spec.k)
        if m > 1:
            x[0] = 0
        residual = draw(m, columns) if spec.residual else None
        yield Case(
            (x, weight, scale, bias),
            (
                spec.format,
                spec.shuffled,
                spec.round_input,
                norm_weight,
                residual,
                1e-6,
                spec.one_plus,
                spec.activation,
                zeros,
                spec.code,
                nested,
                order,
            ),
        )


def _nested(scale: Tensor) -> tuple[Tensor, Nested]:
    """Quantise scales to uint8. Returns the numbers, and how they are decoded."""
    code = torch.linspace(-0.5, 0.5, 256, device=scale.device)
    low, high = scale.float().aminmax()
    factors = torch.stack([high - low, (high + low) / 2]).expand(-(-scale.numel() // PER_FACTOR), 2)
    levels = ((scale.float() - low) / (high - low).clamp(min=1e-30) * 255).round()
    return levels.to(torch.uint8), Nested(code, factors.contiguous())


def _powers_of_two(scale: Tensor) -> Tensor:
    """Round positive scales down to powers of two, and return their uint8 exponents, as in MXFP4."""
    return (scale.float().frexp().exponent + 126).to(torch.uint8)


def _encoded(numbers: Tensor, spec: QuantizedSpec) -> tuple[Tensor, Tensor]:
    if spec.format == INT4:
        return quantize_groups(numbers, spec.group)
    if spec.group:
        return quantize_blocks(numbers, spec.format)
    weight, scale = quantize_rows(numbers, spec.format)
    return weight, scale.flatten().float()


_operation = Operation("quantized_linear", QuantizedSpec, _cases, _kind, family="linear", terms=QuantizedCall)
for _name, _refuses, _call in (
    ("gemm_a8w8_bpreshuffle", aiter.shuffled_refuses, aiter.shuffled_linear),
    ("gemm_a8w8", aiter.refuses, aiter.linear),
):
    _operation.register(Implementation("aiter", _name, _refuses, one_by_one(_call), checked("quantized_linear", _name)))
_operation.register(
    Implementation(
        "triton",
        triton.NAME,
        _triton_refuses,
        triton.quantized_linear,
        triton_detect.checked("quantized_linear", triton.NAME),
    )
)
_operation.register(
    Implementation(
        "triton",
        triton.DEQUANTIZE,
        triton.dequantize_refuses,
        one_by_one(triton.dequantized_linear, reorder=None),
        triton_detect.checked("quantized_linear", triton.DEQUANTIZE),
    )
)
for _name, _refuses, _call in (
    ("_scaled_mm", quantized_torch.scaled_inside_refuses, quantized_torch.scaled_mm),
    ("_scaled_mm, scaled after", quantized_torch.fp8_refuses, quantized_torch.scaled_mm_then_scale),
    ("_int_mm", quantized_torch.int8_refuses, quantized_torch.int_mm),
):
    _operation.register(Implementation("torch", _name, _refuses, one_by_one(_call), _checked(_name)))
_operation.register(
    Implementation(
        "torch",
        "dequantize, F.linear",
        quantized_torch.dequantized_refuses,
        one_by_one(quantized_torch.dequantized_linear),
    )
)
_operation.register(
    Implementation(
        "eager",
        "dequantize, matmul",
        refuses_nothing,
        one_by_one(quantized_torch.eager_linear, eager_rms_norm, eager_act_and_mul),
    )
)


def choose(spec: QuantizedSpec) -> tuple[str, str]:
    """(tier, name) of the implementation for this specification. May run a first-use check."""
    chosen = _operation.choose(spec).implementation
    return chosen.tier, chosen.name


def shuffle_refuses(spec: QuantizedSpec, device: Device) -> str | None:
    """Why aiter's kernel for shuffled weights can't serve a weight of this specification, or None."""
    return aiter.shuffled_refuses(spec._replace(shuffled=True), device)
