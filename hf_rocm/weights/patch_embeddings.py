"""Patch embeddings as GEMMs: the convolutions at the start of vision models, whose patches do not overlap.

Such a convolution is a linear layer over flattened patches. MIOpen computes it slowly, and for Conv3d it crashes the
process on some GPUs in some releases (https://github.com/Comfy-Org/ComfyUI/issues/15895). The weights keep their memory
and their shape.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state
from torch.nn import functional

# The names in torch.nn may have been replaced.
from torch.nn.modules.conv import Conv2d, Conv3d

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import linears_are_pytorchs
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.linear import exporting, left_to_pytorch
from hf_rocm.overlay import bind
from hf_rocm.overlay.dependencies import Reference
from hf_rocm.overlay.replacements import constant_in_traces, replacement_among
from hf_rocm.weights import instance_forward
from hf_rocm.weights.eligible import accepted_forward

# A key in a convolution's __dict__: the class of the module around it, which only flattens the output.
_FLATTENED_BY = "_hf_rocm_flattened_by"

# The stock forwards and the functions that they call, by class.
_CALLED = {
    cls: (Reference(cls, "forward"), Reference(cls, "_conv_forward"), Reference(vars(functional), function))
    for cls, function in ((Conv2d, "conv2d"), (Conv3d, "conv3d"))
}
_LAYOUTS = {Conv2d: torch.channels_last, Conv3d: torch.channels_last_3d}


def forward(self: Any, input: Tensor) -> Tensor:
    """Compute the convolution as a GEMM.

    input: [B, C, size_1, …], in the weight's dtype. Returns [B, N, size_1 // kernel_1, …], in the memory format of a
    convolution, or with N as the innermost dim if the module around it only flattens the patches (`_flattens`).
    Unsupported calls run the stock forward, as do all calls if a function that the stock forward calls was replaced.
    """
    weight = self._parameters.get("weight")
    if not _serves(self, input, weight):
        output: Tensor = type(self).forward(self, input)
        return output
    patches, counts = _patches(input, self.kernel_size)
    flat, bias = weight.flatten(1), self._parameters.get("bias")
    multiply = functional.linear if compiling() else ops.linear
    rows = multiply(patches, flat, bias).view(input.shape[0], *counts, weight.shape[0])
    result = rows.movedim(-1, 1)
    if _flattened(self):
        return result
    if compiling() or input.is_contiguous() or not input.is_contiguous(memory_format=_LAYOUTS[type(self)]):
        return result.contiguous()
    return result


for _cls in _CALLED:
    instance_forward.declare(_cls, forward)


def attach(model: nn.Module, mode: str) -> tuple[list[str], dict[str, str]]:
    """Compute the patch embeddings of a model as GEMMs, in place. Idempotent.

    mode: as in `overlay.bind`. Returns the names of these convolutions, and name → the reason why an eligible one
    stays stock.
    """
    served: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) not in _CALLED or not _non_overlapping(module):
            continue
        if not accepted_forward(module):
            skipped[name] = "it has its own forward"
            continue
        bind.set_mode(module, mode)
        instance_forward.attach(module)
        parent, _, child = name.rpartition(".")
        parent_class: Any = type(model.get_submodule(parent))
        if _flattens(parent_class, child) is not None:
            module.__dict__[_FLATTENED_BY] = parent_class
        served.append(name)
    return served, skipped


def detach(model: nn.Module) -> None:
    """Undo `attach`, except for the mode, which `hf_rocm.restore` removes."""
    for module in model.modules():
        if isinstance(module, tuple(_CALLED)):
            instance_forward.detach(module)
            module.__dict__.pop(_FLATTENED_BY, None)


def in_force(model: nn.Module) -> list[str]:
    """The names of the convolutions that currently run as GEMMs in calls that `forward` supports."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) in _CALLED and instance_forward.is_attached(module) and _is_pytorch_class(type(module))
    ]


def _non_overlapping(convolution: Any) -> bool:
    """Whether stride and kernel are equal and cover more than one element, without padding, dilation or groups."""
    return (
        convolution.kernel_size == convolution.stride
        and math.prod(convolution.kernel_size) > 1
        and (convolution.padding == "valid" or set(convolution.padding) == {0})
        and set(convolution.dilation) == {1}
        and convolution.groups == 1
    )


def _serves(self: Any, x: Any, weight: Any) -> bool:
    mode = self.__dict__.get(bind.MODE, bind.OFF)
    if (
        mode == bind.OFF
        or type(self) not in _CALLED
        or weight.__class__ is not nn.Parameter
        or not isinstance(x, Tensor)
    ):
        return False
    if mode == bind.GPU and not x.is_cuda:
        return False
    if torch.is_autocast_enabled(x.device.type) or not _is_pytorch_class(type(self)):
        return False
    if compiling():
        if exporting():
            return False
    elif left_to_pytorch(x) or _get_tracing_state() is not None:
        return False
    if "_conv_forward" in self.__dict__ or not linears_are_pytorchs() or not _non_overlapping(self):
        return False
    kernel = self.kernel_size
    return (
        x.dim() == weight.dim()
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.shape[1] == weight.shape[1]
        and tuple(weight.shape[2:]) == kernel
        and all(size >= width for size, width in zip(x.shape[2:], kernel, strict=True))
    )


@constant_in_traces
def _is_pytorch_class(cls: Any) -> bool:
    """Whether this convolution class is PyTorch's own, apart from hf_rocm's changes."""
    return replacement_among(_CALLED[cls]) is None


@constant_in_traces
def _flattened(convolution: Any) -> bool:
    """Whether the module around this convolution still flattens its output."""
    parent_class = convolution.__dict__.get(_FLATTENED_BY)
    return parent_class is not None and _flattened_by.get(parent_class) is parent_class.forward


# Class → its forward, which flattens the outputs of its convolutions
_flattened_by: dict[Any, Callable[..., Any]] = {}


@cache
def _flattens(cls: Any, child: str) -> Callable[..., Any] | None:
    """Return the forward of a transformers class that uses this child's output only as `….flatten(2)`, else None.

    With patches as rows and N as the innermost dim, `.flatten(2).transpose(1, 2)` is then contiguous. With the
    format of a convolution, neither this tensor nor the hidden states of the following layers would be contiguous, and
    residual sums would take three times as long.
    """
    if cls.__module__.partition(".")[0] != "transformers":
        return None
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(cls.forward))).body
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return None
    nodes = list(ast.walk(function))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    outputs = [call for call in calls if ast.unparse(call.func) == f"self.{child}"]
    stored = [node for node in nodes if isinstance(node, ast.Assign) and node.value in outputs]
    names = [target.id for node in stored for target in node.targets if isinstance(target, ast.Name)]
    loads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    kept = [assignment.value for assignment in stored]
    uses = [*(load for load in loads if load.id in names), *(call for call in outputs if call not in kept)]
    flattened = [
        call.func.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and ast.unparse(call).endswith(".flatten(2)")
    ]
    if not outputs or len(names) != len(stored) or not all(use in flattened for use in uses):
        return None
    _flattened_by[cls] = cls.forward
    return _flattened_by[cls]


def _patches(x: Tensor, kernel: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Return the patches [B · count_1 · …, C · kernel_1 · …], one per row, and the counts. Remainders are dropped."""
    counts = [size // width for size, width in zip(x.shape[2:], kernel, strict=True)]
    for axis, (count, width) in enumerate(zip(counts, kernel, strict=True), start=2):
        if x.shape[axis] != count * width:
            x = x.narrow(axis, 0, count * width)
    split = [part for pair in zip(counts, kernel, strict=True) for part in pair]
    axes = len(kernel)
    counted, inside = [2 + 2 * axis for axis in range(axes)], [3 + 2 * axis for axis in range(axes)]
    blocks = x.reshape(x.shape[0], x.shape[1], *split).permute(0, *counted, 1, *inside)
    return blocks.reshape(x.shape[0] * math.prod(counts), x.shape[1] * math.prod(kernel)), counts
