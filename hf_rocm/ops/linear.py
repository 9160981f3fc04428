"""linear: x Wᵀ + b; fused_linear: the same with the norm before it, and the gate and residual sum after it.

The torch tier is the BLAS library behind `F.linear`; aiter's tuned GEMMs and hf_rocm's kernels for few rows take
precedence if they accept the call. This module also defines which calls always go to PyTorch, and which GEMMs count as
GEMMs with few rows.

A GEMM with few rows is limited by memory bandwidth, so its kernel can compute the surrounding operations at almost no
extra cost, which saves their launches. Without such a kernel the operations run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, compiler
from torch._C import _get_tracing_state
from torch.autograd import forward_ad

from hf_rocm.device import Device
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.aiter import linear as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.pointwise import act_and_mul, eager_act_and_mul, eager_rms_norm, rms_norm
from hf_rocm.ops.probe_cases import Draw, fewer_rows, smaller
from hf_rocm.ops.registry import Case, Choice, Implementation, Operation, chosen_elsewhere, refuses_nothing
from hf_rocm.ops.specs.linear import MANY, FusedLinearSpec, LinearSpec
from hf_rocm.ops.specs.pointwise import Norm
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import linear as triton
from hf_rocm.ops.triton.tiles import ROWS

# The largest M for which a GEMM counts as limited by memory bandwidth.
FEW = 32
# M rounded up to a power of two.
ROWS_CLASS = tuple(1 << (m - 1).bit_length() if m else 0 for m in range(FEW + 1))

# The activations of fused GEMMs.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
# The tiers before triton.
BEFORE = ("user", "aiter")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    x: [..., K]; weight: [N, K]; bias: [N] or None; all of the same dtype. Returns [..., N].
    """
    spec = specification(x, weight, bias)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(x, weight, bias)
    return result


def linear_by_aiter(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, but a call without gradients that aiter can't serve raises `TierUnavailable`."""
    # The implementation is selected for many rows, as in `choose`.
    spec = LinearSpec(*specification(x, weight, bias))._replace(rows=MANY)
    reason = None if spec.grad else aiter_refuses(_operation.choose(spec))
    if reason is not None:
        raise TierUnavailable(
            "this linear layer must run in aiter, which can't serve this call",
            facts={"x": f"{tuple(x.shape)} {x.dtype} on {x.device}", "weight": tuple(weight.shape), "reason": reason},
            hint="route with linear_backend='auto', or exclude this layer",
        )
    return linear(x, weight, bias)


def specification(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[torch.dtype, torch.dtype, torch.device, int, int, torch.dtype | None, bool, bool, int]:
    """The fields of a `LinearSpec`, as a plain tuple with which the implementation is selected."""
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    dtype, weight_dtype, device = x.dtype, weight.dtype, x.device
    n, k = weight.shape
    bias_dtype = None if bias is None else bias.dtype
    contiguous = weight.is_contiguous()
    m = x.numel() // k if k else 0
    rows = ROWS_CLASS[m] if m <= FEW else MANY
    return (dtype, weight_dtype, device, n, k, bias_dtype, contiguous, grad, rows)


def choose(weight: Tensor, bias: Tensor | None) -> Choice[LinearSpec]:
    """The choice for a layer with these weights, for more than `FEW` rows and without gradients."""
    with torch.no_grad():
        return _operation.choose(LinearSpec(*specification(weight, weight, bias))._replace(rows=MANY))


def aiter_refuses(choice: Choice[LinearSpec]) -> str | None:
    """Why aiter doesn't serve a choice, or None if it does."""
    if choice.implementation.tier == "aiter":
        return None
    reasons = (refusal.reason for refusal in choice.refusals if refusal.tier == "aiter")
    return "; ".join(reasons) or "another tier takes precedence"


def left_to_pytorch(x: Tensor) -> bool:
    """Whether operations on x are left to PyTorch.

    True under autocast, in a function transform, in forward AD, in torch.jit.trace, and for subclasses of Tensor other
    than Parameter.
    """
    return (
        x.__class__ not in _PLAIN
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    )


# The flag was added in torch 2.7. Until 2.12, the compiler evaluates is_exporting() to True, so the flag is used.
_HAS_EXPORT_FLAG = hasattr(torch.compiler, "_is_exporting_flag")


def exporting() -> bool:
    """Whether torch.export is tracing: exported programs must not need hf_rocm. Always False before torch 2.7."""
    return _HAS_EXPORT_FLAG and bool(torch.compiler._is_exporting_flag)


def rows(x: Tensor) -> int:
    """M of the GEMM: the number of rows of x."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def eager_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The oracle: one GEMM and one sum."""
    output = torch.matmul(x, weight.t())
    return output if bias is None else output + bias


_PLAIN = (Tensor, torch.nn.Parameter)


def kind(spec: LinearSpec) -> LinearSpec:
    """The specification whose check is valid for this one.

    One check includes GEMMs with few and with many rows, except for 17 to 32 rows, for which the Triton kernel has
    other tiles.
    """
    return spec._replace(rows=checked_rows(spec.rows))


def checked_rows(rows: int) -> int:
    """The field `rows` of the specification whose check is valid for this number of rows."""
    return FEW if rows > ROWS else MANY


def _cases(spec: LinearSpec) -> Iterator[Case]:
    return cases(spec.dtype, spec.device, spec.n, spec.k, bias=spec.bias_dtype is not None, rows=spec.rows)


def cases(dtype: torch.dtype, device: torch.device, n: int, k: int, *, bias: bool, rows: int = MANY) -> Iterator[Case]:
    """GEMMs for checking an implementation: (x, weight, bias). rows: see `checked_rows`."""
    n, draw = fewer_rows(n, k), Draw(dtype, device)
    weight = draw(n, k) * k**-0.5
    added = draw(n) if bias else None
    # Different kernels serve these numbers of rows.
    for m in (1, 3, 8, 33) if rows == MANY else (20,):
        yield Case((draw(m, k), weight, added))


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) Wᵀ + b, then the gate, then + residual; each part only if its argument is given.

    x: [..., K]; weight: [N, K]; bias: [N] or None. norm: the parameters of the norm of x. activation: `silu`, `gelu` or
    `gelu_tanh`: the GEMM returns [gate | up], and the result act(gate) · up has N / 2 columns. residual: [..., N] or
    [..., N / 2], in x's dtype. Each part is rounded as a separate layer would round it. Returns [..., N] or
    [..., N / 2]. Raises `OptionError` for any other activation.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise OptionError(
            f"fused_linear does not support the activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)}
        )
    norm_weight, eps, one_plus = (None, 0.0, False) if norm is None else norm
    grad = torch.is_grad_enabled() and _requires_grad(x, weight, bias, norm_weight, residual)
    dtype, weight_dtype, device = x.dtype, weight.dtype, x.device
    n, k = weight.shape
    bias_dtype = None if bias is None else bias.dtype
    norm_dtype = None if norm_weight is None else norm_weight.dtype
    contiguous = weight.is_contiguous()
    m = x.numel() // k if k else 0
    rows = ROWS_CLASS[m] if m <= FEW else MANY
    spec = (
        dtype,
        weight_dtype,
        device,
        n,
        k,
        bias_dtype,
        contiguous,
        norm_dtype,
        one_plus,
        activation,
        residual is not None,
        grad,
        rows,
    )
    serve = _fused.traced(spec) if compiling() or compiler._is_compiling_flag else _fused.calls[spec]
    result: Tensor = serve(x, weight, bias, norm_weight, residual, eps, one_plus, activation)
    return result


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def fused_linear_serves(x: Tensor) -> bool:
    """Whether a kernel can compute a GEMM of x together with its norm, gate and residual sum, judged by x alone.

    x: [..., K]. False for more than `FEW` rows or none, while gradients are enabled, under torch.export, and under
    torch.compile, which fuses these operations itself.
    """
    if compiling() or compiler._is_compiling_flag or torch.is_grad_enabled():
        return False
    k = x.shape[-1]
    m = x.numel() // k if k else 0
    if not 0 < m <= FEW:
        return False
    square = _square(x.dtype, x.device, k, ROWS_CLASS[m])
    try:
        return _fused.choices[square].implementation.tier == "triton"
    except TierUnavailable:
        # The named tier can't serve it: a call of the operation raises an error with every reason.
        return False


@cache
def _square(dtype: torch.dtype, device: torch.device, k: int, rows: int) -> FusedLinearSpec:
    """The specification of a square GEMM of this input with a residual sum."""
    return FusedLinearSpec(
        dtype=dtype,
        weight_dtype=dtype,
        device=device,
        n=k,
        k=k,
        bias_dtype=None,
        contiguous=True,
        norm_dtype=None,
        one_plus=False,
        activation=None,
        residual=True,
        grad=False,
        rows=rows,
    )


def _one_by_one(
    norm: Callable[..., Tensor], multiply: Callable[..., Tensor], gate: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function that runs these operations one after another, as separate layers would."""

    def fused_linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        residual: Tensor | None,
        eps: float,
        one_plus: bool,
        activation: str | None,
    ) -> Tensor:
        if norm_weight is not None:
            x = norm(x, norm_weight, eps=eps, one_plus=one_plus)
        output = multiply(x, weight, bias)
        if activation is not None:
            output = gate(output, activation=activation)
        return output if residual is None else residual + output

    return fused_linear


# Each part runs in the implementation that serves it.
composed = _one_by_one(rms_norm, linear, act_and_mul)
# The oracle.
eager_fused_linear = _one_by_one(eager_rms_norm, eager_linear, eager_act_and_mul)


def _triton_refuses(spec: FusedLinearSpec, device: Device) -> str | None:
    return triton.fused_refuses(spec, device) or _parts_elsewhere(spec, device)


def _parts_elsewhere(spec: FusedLinearSpec, device: Device) -> str | None:
    """Return why one kernel must not replace the parts, or None.

    The reasons are that the user chose the tier or kernel of a part, and that aiter serves the GEMM.
    """
    parts = {"linear": True, "rms_norm": spec.norm_dtype is not None, "act_and_mul": spec.activation is not None}
    reason = chosen_elsewhere(name for name, present in parts.items() if present)
    if reason is not None:
        return reason
    return "aiter serves the GEMM" if _preferred(spec, device) == "aiter" else None


def _preferred(spec: FusedLinearSpec, device: Device) -> str | None:
    """The tier that serves the GEMM alone, if it takes precedence over triton; else None."""
    alone = LinearSpec(
        dtype=spec.dtype,
        weight_dtype=spec.weight_dtype,
        device=spec.device,
        n=spec.n,
        k=spec.k,
        bias_dtype=spec.bias_dtype,
        contiguous=spec.contiguous,
        grad=spec.grad,
        rows=spec.rows,
    )
    before = (candidate for candidate in _operation.implementations if candidate.tier in BEFORE)
    if any(candidate.refuses(alone, device) is None for candidate in before):
        tier = _operation.choose(alone).implementation.tier
        return tier if tier in BEFORE else None
    return None


def _composed_in(tier: str) -> Implementation[FusedLinearSpec]:
    """Return an implementation that runs the parts one by one if this tier serves the GEMM."""

    def refuses(spec: FusedLinearSpec, device: Device) -> str | None:
        return None if _preferred(spec, device) == tier else f"the {tier} tier doesn't serve the GEMM"

    return Implementation(tier, "one by one", refuses, composed)


def _fused_kind(spec: FusedLinearSpec) -> FusedLinearSpec:
    """Return a smaller specification that leads to the same tiles of hf_rocm's kernels."""
    return spec._replace(
        rows=checked_rows(spec.rows), n=smaller(spec.n, 4160), k=spec.k if spec.k <= 2048 else 1024 + spec.k % 1024
    )


def _fused_cases(spec: FusedLinearSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for case in cases(spec.dtype, spec.device, spec.n, spec.k, bias=spec.bias_dtype is not None, rows=spec.rows):
        x, weight, bias = case.tensors
        assert x is not None and weight is not None
        n = weight.shape[0] if spec.activation is None else weight.shape[0] // 2
        norm = None if spec.norm_dtype is None else draw(spec.k).to(spec.norm_dtype)
        residual = draw(x.shape[0], n) if spec.residual else None
        yield Case((x, weight, bias, norm, residual), (1e-6, spec.one_plus, spec.activation))


_operation = Operation("linear", LinearSpec, _cases, kind)
_operation.register(
    Implementation("aiter", "gemm_a16w16", aiter.refuses, aiter.linear, checked("linear", "gemm_a16w16"))
)
_operation.register(
    Implementation("triton", triton.NAME, triton.refuses, triton.linear, triton_detect.checked("linear", triton.NAME))
)
_operation.register(Implementation("torch", "F.linear", refuses_nothing, F.linear))
_operation.register(Implementation("eager", "matmul", refuses_nothing, eager_linear))

_fused = Operation("fused_linear", FusedLinearSpec, _fused_cases, _fused_kind, family="linear")
for _tier in BEFORE:
    _fused.register(_composed_in(_tier))
_fused.register(
    Implementation(
        "triton",
        triton.NAME,
        _triton_refuses,
        triton.fused_linear,
        triton_detect.checked("fused_linear", triton.NAME),
    )
)
_fused.register(Implementation("torch", "one by one", refuses_nothing, composed))
_fused.register(Implementation("eager", "formulas", refuses_nothing, eager_fused_linear))
