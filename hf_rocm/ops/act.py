"""act: one operation for activations that transformers computes in several operations.

transformers writes the sigmoid approximation of GELU (CLIP) and Google's tanh approximation as formulas, which take
three and eight kernels. Each of these kernels reads and writes the widest tensor of a layer. For GELU and SiLU, PyTorch
already has single kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.pointwise import ActSpec
from hf_rocm.ops.triton import activation as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.options import Switch


def act(x: Tensor, *, activation: str) -> Tensor:
    """The activation of every element. x: any shape, floating-point. Returns a new tensor of that shape.

    activation: `quick_gelu`, x · σ(1.702 x), or `gelu_new`, 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), from
    Hendrycks and Gimpel 2016. Raises `OptionError` for any other activation.
    """
    if activation not in ACTIVATIONS:
        raise OptionError(
            f"act does not support the activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)}
        )
    spec = _specification(x, activation)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(x, activation)
    return result


def one_kernel(x: Tensor, activation: str) -> bool:
    """Whether one kernel computes `act`, so that it is faster than the formula."""
    current = options.current()
    if current.aiter["act_and_mul"] is Switch.REQUIRED or current.tier("act_and_mul") not in (None, "triton"):
        return False
    return kernel_serves(_operation, _specification(x, activation))


def _specification(x: Tensor, activation: str) -> tuple[object, ...]:
    grad = torch.is_grad_enabled() and x.requires_grad
    dtype, device = x.dtype, x.device
    return (dtype, device, activation, grad)


def torch_act(x: Tensor, activation: str) -> Tensor:
    """The formula as transformers writes it, rounded after every operation: bitwise equal to the stock modules."""
    return _FORMULAS[activation](x)


def eager_act(x: Tensor, activation: str) -> Tensor:
    """The oracle: the formula in at least fp32, rounded once at the end."""
    return _FORMULAS[activation](x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0)))),
}
ACTIVATIONS = tuple(_FORMULAS)


def _cases(spec: ActSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for size in (1, LENGTH * 64):
        yield Case((draw(size) * 3,), (spec.activation,))


_NAME = "act_kernel"
_operation = Operation("act", ActSpec, _cases, family="act_and_mul", recorded=(0,))
_operation.register(Implementation("triton", _NAME, triton.refuses, triton.act, checked_triton("act", _NAME)))
_operation.register(Implementation("torch", "formula", refuses_nothing, torch_act))
_operation.register(Implementation("eager", "formula in fp32", refuses_nothing, eager_act))
