"""The small operations between a layer's GEMMs: rms_norm, add_rms_norm, act_and_mul and rope."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, compiler

from hf_rocm.device import Device
from hf_rocm.errors import OptionError
from hf_rocm.ops.aiter import activation as aiter_activation
from hf_rocm.ops.aiter import detect as aiter_detect
from hf_rocm.ops.aiter import norm as aiter_norm
from hf_rocm.ops.aiter import rope as aiter_rope
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.attention import AttendIntoCacheSpec
from hf_rocm.ops.specs.pointwise import ActivationSpec, NormSpec, RopeIntoCacheSpec, RopeSpec
from hf_rocm.ops.triton import activation as triton_activation
from hf_rocm.ops.triton import detect as triton_detect
from hf_rocm.ops.triton import norm as triton_norm
from hf_rocm.ops.triton import rope as triton_rope

CLAMPED = "clamped_swiglu"


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, one_plus: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last dim, accumulated in fp32 (fp64 for fp64).

    x: [..., D], floating-point; weight: [D]. one_plus: multiply by (1 + w), as Gemma's checkpoints expect.
    Returns [..., D] in x's dtype. Zhang and Sennrich 2019, eq. 4.
    """
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    dtype, weight_dtype, device, dim = x.dtype, weight.dtype, x.device, x.shape[-1]
    spec = (dtype, weight_dtype, device, dim, one_plus, grad)
    serve = _rms_norm.traced(spec) if compiling() or compiler._is_compiling_flag else _rms_norm.calls[spec]
    result: Tensor = serve(x, weight, eps, one_plus)
    return result


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """`F.rms_norm`; (1 + w) is computed in fp32, because rounding it to bf16 would lose small weights."""
    if one_plus:
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)
    normed = F.rms_norm(x, weight.shape, weight, eps)
    # under autocast, F.rms_norm returns fp32, unlike transformers' norm
    return normed if normed.dtype == x.dtype else normed.to(x.dtype)


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """The oracle: the formula, step by step, rounded once at the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    scale = weight.to(wide)
    if one_plus:
        scale = 1.0 + scale
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * scale).to(x.dtype)


def _torch_refuses(spec: NormSpec, device: Device) -> str | None:
    if not spec.one_plus and spec.weight_dtype != spec.dtype:
        return f"F.rms_norm needs one dtype, got {spec.dtype} and a weight of {spec.weight_dtype}"
    if spec.one_plus and spec.dtype == torch.float64:
        return "the (1 + w) form is computed in fp32, which would round fp64"
    return None


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is the next residual.

    x, residual: [..., D], one dtype; weight: [D]. one_plus: see `rms_norm`. Returns two new tensors [..., D].
    """
    grad = torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad)
    dtype, weight_dtype, device, dim = x.dtype, weight.dtype, x.device, x.shape[-1]
    spec = (dtype, weight_dtype, device, dim, one_plus, grad)
    serve = _add_rms_norm.traced(spec) if compiling() or compiler._is_compiling_flag else _add_rms_norm.calls[spec]
    result: tuple[Tensor, Tensor] = serve(x, residual, weight, eps, one_plus)
    return result


def torch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's sum, then `torch_rms_norm`."""
    total = x + residual
    return torch_rms_norm(total, weight, eps, one_plus), total


def eager_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """The oracle: the sum, then the formula."""
    total = x + residual
    return eager_rms_norm(total, weight, eps, one_plus), total


def act_and_mul(
    x: Tensor, *, activation: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """act(gate) · up, where gate is x[..., :d] and up is x[..., d:].

    x: [..., 2d], floating-point. interleaved: gate and up alternate, x[..., ::2] and x[..., 1::2]. activation: `silu`,
    `gelu` (erf), `gelu_tanh`, or `clamped_swiglu`, which is (min(max(up, −limit), limit) + 1) · g · σ(alpha · g) with
    g = min(gate, limit), as in gpt-oss; limit and alpha apply only to `clamped_swiglu`. Returns [..., d].
    Shazeer 2020 (GLU variants). Raises `OptionError` for any other activation.
    """
    if activation not in ACTIVATIONS:
        raise OptionError(
            f"act_and_mul does not support the activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)}
        )
    spec = _activation_specification(x, activation, interleaved)
    serve = _act_and_mul.traced(spec) if compiling() or compiler._is_compiling_flag else _act_and_mul.calls[spec]
    result: Tensor = serve(x, activation, interleaved, limit, alpha)
    return result


def one_kernel(x: Tensor, *, activation: str, interleaved: bool = False) -> bool:
    """Whether one kernel computes `act_and_mul`, for operations that contain it."""
    return kernel_serves(_act_and_mul, _activation_specification(x, activation, interleaved))


def _activation_specification(x: Tensor, activation: str, interleaved: bool) -> tuple[object, ...]:
    grad = torch.is_grad_enabled() and x.requires_grad
    dtype, device, dim = x.dtype, x.device, x.shape[-1] // 2
    return (dtype, device, dim, activation, grad, interleaved)


def torch_act_and_mul(x: Tensor, activation: str, interleaved: bool, limit: float, alpha: float) -> Tensor:
    """PyTorch's activation and a multiplication, as in the unfused layers."""
    gate, up = _gate_up(x, interleaved)
    if activation == CLAMPED:
        return _clamped(gate, up, limit, alpha)
    return _TORCH[activation](gate) * up


def eager_act_and_mul(
    x: Tensor, activation: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """The oracle: the formula in at least fp32, rounded once at the end."""
    gate, up = _gate_up(x.to(torch.promote_types(x.dtype, torch.float32)), interleaved)
    if activation == CLAMPED:
        return _clamped(gate, up, limit, alpha).to(x.dtype)
    return (_FORMULAS[activation](gate) * up).to(x.dtype)


def _gate_up(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def _clamped(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_TORCH: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}
ACTIVATIONS = (*_TORCH, CLAMPED)

# Hendrycks and Gimpel 2016: the Gaussian error linear unit, exact and in its tanh approximation.
_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the first R of D dims of every head by the angles of the token's position; other dims are unchanged.

    query: [B, H, S, D]; key: [B, Hkv, S, D]; cos, sin: [B | 1, S, R], each angle twice: in both halves, or next to
    each other if interleaved. Pairs are (i, i + R/2), or (2i, 2i + 1) if interleaved. Su et al. 2021, eq. 34.
    Returns new tensors with the shapes of query and key.
    """
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    dtype, angle_dtype, device, head_dim = query.dtype, cos.dtype, query.device, query.shape[-1]
    batch, _, rotated = cos.shape
    shared = batch == 1
    spec = (dtype, angle_dtype, device, head_dim, rotated, interleaved, shared, grad)
    serve = _rope.traced(spec) if compiling() or compiler._is_compiling_flag else _rope.calls[spec]
    result: tuple[Tensor, Tensor] = serve(query, key, cos, sin, interleaved)
    return result


def torch_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate in the dtype of the tensors, like the unfused layers."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(query, cos, sin, interleaved), _rotated(key, cos, sin, interleaved)


def eager_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The oracle: the formula in at least fp32, rounded once at the end."""
    wide = torch.promote_types(query.dtype, torch.float32)
    outputs = torch_rope(query.to(wide), key.to(wide), cos.to(wide), sin.to(wide), interleaved)
    return outputs[0].to(query.dtype), outputs[1].to(key.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    r = cos.shape[-1]
    if r < x.shape[-1]:
        return torch.cat((_rotated(x[..., :r], cos, sin, interleaved), x[..., r:]), dim=-1)
    if interleaved:
        even, odd = x[..., ::2], x[..., 1::2]
        crossed = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        crossed = torch.cat((-x[..., r // 2 :], x[..., : r // 2]), dim=-1)
    return x * cos + crossed * sin


def _norm_cases(spec: NormSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        yield Case((draw(m, spec.dim), draw(spec.dim)), (1e-6, spec.one_plus))


def _add_norm_cases(spec: NormSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        yield Case((draw(m, spec.dim), draw(m, spec.dim), draw(spec.dim)), (1e-6, spec.one_plus))


def _activation_cases(spec: ActivationSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        yield Case((draw(m, 2 * spec.dim) * 3,), (spec.activation, spec.interleaved, 2.0, 1.702))


def _rope_cases(spec: RopeSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    query = draw(2, LENGTH, 4, spec.head_dim).transpose(1, 2)
    key = draw(2, 2, LENGTH, spec.head_dim)
    yield Case((query, key, *angles(spec, draw, 2, LENGTH)), (spec.interleaved,))


def angles(
    spec: RopeSpec | RopeIntoCacheSpec | AttendIntoCacheSpec, draw: Draw, b: int, s: int
) -> tuple[Tensor, Tensor]:
    """(cos, sin) [B | 1, S, R] of a case."""
    half = draw(1 if spec.shared else b, s, spec.rotated // 2).double()
    both = half.repeat_interleave(2, -1) if getattr(spec, "interleaved", False) else torch.cat((half, half), -1)
    return both.cos().to(spec.angle_dtype), both.sin().to(spec.angle_dtype)


def _register(
    operation: Operation[Any],
    aiter: tuple[str, Callable[[Any, Device], str | None], Callable[..., Any]],
    triton: tuple[str, Callable[[Any, Device], str | None], Callable[..., Any]],
    torch_: tuple[str, Callable[[Any, Device], str | None], Callable[..., Any]],
    eager: tuple[str, Callable[..., Any]],
) -> None:
    """Register one implementation per tier: its name, predicate and function. The eager one refuses nothing."""
    operation.register(Implementation("aiter", *aiter, aiter_detect.checked(operation.name, aiter[0])))
    operation.register(Implementation("triton", *triton, triton_detect.checked(operation.name, triton[0])))
    operation.register(Implementation("torch", *torch_))
    operation.register(Implementation("eager", eager[0], refuses_nothing, eager[1]))


_rms_norm = Operation("rms_norm", NormSpec, _norm_cases)
_register(
    _rms_norm,
    ("rms_norm", aiter_norm.refuses, aiter_norm.rms_norm),
    ("rms_norm_kernel", triton_norm.refuses, triton_norm.rms_norm),
    ("F.rms_norm", _torch_refuses, torch_rms_norm),
    ("formula", eager_rms_norm),
)
_add_rms_norm = Operation("add_rms_norm", NormSpec, _add_norm_cases, family="rms_norm", recorded=(0, 2))
_register(
    _add_rms_norm,
    ("rmsnorm2d_fwd_with_add", aiter_norm.add_refuses, aiter_norm.add_rms_norm),
    ("rms_norm_kernel", triton_norm.refuses, triton_norm.add_rms_norm),
    ("add, F.rms_norm", _torch_refuses, torch_add_rms_norm),
    ("add, formula", eager_add_rms_norm),
)
_act_and_mul = Operation("act_and_mul", ActivationSpec, _activation_cases, recorded=(0,))
_register(
    _act_and_mul,
    ("act_and_mul", aiter_activation.refuses, aiter_activation.act_and_mul),
    ("act_and_mul_kernel", triton_activation.refuses, triton_activation.act_and_mul),
    ("F.silu/F.gelu", refuses_nothing, torch_act_and_mul),
    ("formula", eager_act_and_mul),
)
_rope = Operation("rope", RopeSpec, _rope_cases)
_register(
    _rope,
    ("rope_cached_2c", aiter_rope.refuses, aiter_rope.rope),
    ("rope_kernel", triton_rope.refuses, triton_rope.rope),
    ("two products", refuses_nothing, torch_rope),
    ("formula", eager_rope),
)
