"""norm_add: the norm of a branch's output, the residual sum, and the next norm, in one operation.

Layers with a norm after attention and MLP (Gemma 2 and 3, OLMo 2, GLM-4, …) run these operations in sequence. With few
rows, they are so small that separate kernels take longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.pointwise import eager_rms_norm, torch_rms_norm
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, chosen_elsewhere, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.pointwise import Norm, NormAddSpec
from hf_rocm.ops.triton import norm as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.options import Switch


def norm_add(x: Tensor, residual: Tensor, norm: Norm, then: Norm | None = None) -> tuple[Tensor | None, Tensor]:
    """residual + rms_norm(x), and the norm of that sum if `then` is given. Rounds where separate layers would round.

    x, residual: [..., D], one dtype. norm, then: the norms; both multiply by (1 + w) or neither does, and their weights
    [D] have one dtype. Returns (the normalised sum or None, the sum), new tensors [..., D]. Raises `OptionError` if the
    norms differ in kind.
    """
    spec = _specification(x, residual, norm, then)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    weight, eps = (None, 0.0) if then is None else then[:2]
    normed, total = serve(x, residual, norm.weight, weight, norm.eps, eps, norm.one_plus)
    return (None if then is None else normed), total


def one_kernel(x: Tensor, residual: Tensor, norm: Norm, then: Norm | None = None) -> bool:
    """Whether one kernel computes `norm_add`, which is faster than several calls."""
    if then is not None and not _alike(norm, then):
        return False
    if options.current().aiter["rms_norm"] is Switch.REQUIRED or chosen_elsewhere(["rms_norm"]) is not None:
        return False
    return kernel_serves(_operation, _specification(x, residual, norm, then))


def _alike(norm: Norm, then: Norm) -> bool:
    return norm.one_plus is then.one_plus and norm.weight.dtype == then.weight.dtype


def _specification(x: Tensor, residual: Tensor, norm: Norm, then: Norm | None) -> tuple[object, ...]:
    if then is not None and not _alike(norm, then):
        raise OptionError("norm_add requires norms of the same kind", facts={"found": f"{norm} and {then}"})
    tensors = x, residual, norm.weight, norm.weight if then is None else then.weight
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    dtype, weight_dtype, device, dim, one_plus = x.dtype, norm.weight.dtype, x.device, x.shape[-1], norm.one_plus
    following = then is not None
    return (dtype, weight_dtype, device, dim, one_plus, following, grad)


def _in_turn(normalise: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that applies this norm, PyTorch's sum, and the norm again.

    Without a second norm, the first result is empty.
    """

    def norm_add(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        then_weight: Tensor | None,
        eps: float,
        then_eps: float,
        one_plus: bool,
    ) -> tuple[Tensor, Tensor]:
        total = residual + normalise(x, weight, eps, one_plus)
        normed = x.new_empty(0) if then_weight is None else normalise(total, then_weight, then_eps, one_plus)
        return normed, total

    return norm_add


# The oracle.
eager_norm_add = _in_turn(eager_rms_norm)


def _torch_refuses(spec: NormAddSpec, device: object) -> str | None:
    if not spec.one_plus and spec.weight_dtype != spec.dtype:
        return f"F.rms_norm needs one dtype, got {spec.dtype} and weights of {spec.weight_dtype}"
    if spec.one_plus and spec.dtype == torch.float64:
        return "the (1 + w) form is computed in fp32, which would round fp64"
    return None


def _cases(spec: NormAddSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        weights = [draw(spec.dim).to(spec.weight_dtype) for _ in range(2)]
        then = weights[1] if spec.following else None
        yield Case((draw(m, spec.dim), draw(m, spec.dim), weights[0], then), (1e-6, 1e-5, spec.one_plus))


_operation = Operation("norm_add", NormAddSpec, _cases, family="rms_norm", recorded=(0, 2))
_operation.register(
    Implementation(
        "triton", "rms_norm_kernel", triton.refuses, triton.norm_add, checked_triton("norm_add", "rms_norm_kernel")
    )
)
_operation.register(Implementation("torch", "F.rms_norm, add", _torch_refuses, _in_turn(torch_rms_norm)))
_operation.register(Implementation("eager", "formula, add", refuses_nothing, eager_norm_add))
