"""Check whether linear layers can be fused. A refusal is a sentence, or a sentence without its subject.

The checks are cheap and, except for `accept_forward`, change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm.layers.weight_group import WeightGroup, lock
from hf_rocm.weights.instance_forward import is_class_forward, is_declared

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Compiled kernels assume that the addresses of weights are multiples of this number.
ALIGNMENT = 16  # bytes

NO_PARAMETER = "has a weight that is not a separate parameter, as in FSDP with use_orig_params=False"


def refusal(module: nn.Module, names: Sequence[str]) -> str | None:
    """Return why these children of a module can't be fused into one matrix, or None."""
    linears: list[Any] = []
    for name in names:
        linear = module._modules.get(name)
        if linear is None:
            return f"there is no {name}"
        reason = linear_refusal(linear)
        if reason is not None:
            return f"{name} {reason}"
        linears.append(linear)
    if len(linears) < 2:
        return "there is nothing to fuse in fewer than two layers"
    return group_refusal(names, linears)


def accepted_forward(module: nn.Module) -> bool:
    """Return whether the forward is the class's, hf_rocm's, or accelerate's with a hook that moves no weights.

    `device_map="auto"` across several devices adds a hook to every layer, even if nothing is offloaded. A removed hook
    leaves the class's forward as an attribute.
    """
    forward = module.__dict__.get("forward")
    if forward is None or is_stock(forward, module):
        return True
    hook = module.__dict__.get("_hf_hook")
    weight = next(iter(module._parameters.values()), None)
    return (
        isinstance(forward, functools.partial)
        and getattr(forward.func, "__module__", None) == "accelerate.hooks"
        and bool(forward.args)
        and forward.args[0] is module
        and is_stock(module.__dict__.get("_old_forward"), module)
        and (type(hook).__module__, type(hook).__qualname__) == ("accelerate.hooks", "AlignDevicesHook")
        and not getattr(hook, "offload", True)
        and weight is not None
        and _same_device(getattr(hook, "execution_device", None), weight.device)
    )


def accept_forward(group: WeightGroup, linear: nn.Module, name: str) -> bool:
    """Return whether a forward that was added to an instance, or removed, is harmless; if so, record it as expected."""
    if not accepted_forward(linear):
        return False
    with lock:
        forward = linear.__dict__.get("forward")
        group.parts = tuple(part._replace(forward=forward) if part.name == name else part for part in group.parts)
    return True


def is_stock(forward: object, module: nn.Module) -> bool:
    """Return whether `forward` is the class's or hf_rocm's, bound to this instance. Both compute the same result."""
    return is_class_forward(forward, module) or is_declared(forward, module)


def _same_device(wanted: object, device: torch.device) -> bool:
    if wanted is None:
        return False
    wanted_device = torch.device(wanted)  # type: ignore[call-overload]
    if wanted_device.index is None and wanted_device.type == "cuda":
        return device.type == "cuda" and device.index == torch.cuda.current_device()
    return bool(wanted_device == device)


def linear_refusal(linear: nn.Module) -> str | None:
    """Return why one layer can't be fused, as a sentence without its subject, or None."""
    if type(linear) is not Linear:
        return f"is of type {type(linear).__module__}.{type(linear).__qualname__}, not a plain nn.Linear"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "has a forward hook"
    if not accepted_forward(linear):
        if "_hf_hook" in linear.__dict__:
            return f"is run by a hook ({type(linear.__dict__['_hf_hook']).__name__}) that may move its weights"
        return "has its own forward"
    if "weight" not in linear._parameters:
        return NO_PARAMETER
    for label, parameter in linear._parameters.items():
        if parameter is None and label == "bias":
            continue
        reason = _parameter_refusal(parameter)
        if reason is not None:
            return f"has a {label} that {reason}"
    return None


def _parameter_refusal(parameter: Tensor | None) -> str | None:
    if type(parameter) is not nn.Parameter:
        return f"is of type {type(parameter).__name__}, not Parameter"
    return tensor_refusal(parameter)


def tensor_refusal(parameter: Tensor, *, alone: bool = False) -> str | None:
    """Return why this tensor can't become part of a block, as a sentence without its subject, or None.

    alone: no other tensor uses its storage, so the size of the storage does not matter.
    """
    if parameter.is_meta:
        return "is on the meta device"
    if parameter.dtype not in DTYPES:
        return f"is {parameter.dtype}, but only {', '.join(str(dtype).split('.')[1] for dtype in DTYPES)} are fused"
    if parameter.layout is not torch.strided or not parameter.is_contiguous():
        return "is not contiguous in memory"
    if not parameter.numel():
        return "is empty"
    if parameter.device.type == "cpu" and parameter.is_shared():
        return "is in memory shared with other processes"
    if not alone and parameter.untyped_storage().nbytes() != parameter.nbytes:
        return "is a view of a larger storage"
    return None


def group_refusal(names: Sequence[str], linears: Sequence[Any]) -> str | None:
    """Return why these layers can't be one matrix, or None. linears: individually eligible layers."""
    first = linears[0]
    biased = [name for name, linear in zip(names, linears, strict=True) if linear.bias is not None]
    if biased and len(biased) != len(names):
        return f"only {', '.join(biased)} {'has' if len(biased) == 1 else 'have'} a bias"
    for name, linear in zip(names, linears, strict=True):
        for field, one, other in (
            ("input features", linear.weight.shape[1], first.weight.shape[1]),
            ("dtype", linear.weight.dtype, first.weight.dtype),
            ("device", linear.weight.device, first.weight.device),
            ("inference mode", linear.weight.is_inference(), first.weight.is_inference()),
        ):
            if one != other:
                return f"{name} and {names[0]} differ in {field}: {one} and {other}"
        bias, weight = linear.bias, linear.weight
        if bias is not None:
            if len(bias) != len(weight):
                return f"{name} has {len(weight)} outputs but {len(bias)} biases"
            if (bias.dtype, bias.device, bias.is_inference()) != (weight.dtype, weight.device, weight.is_inference()):
                return f"the weight and the bias of {name} differ in dtype, device or inference mode"
    storages = [tensor.untyped_storage().data_ptr() for tensor in _tensors(linears)]
    if len(set(storages)) != len(storages):
        return "the layers share memory with each other"
    for label in ("weight", "bias")[: 1 + bool(biased)]:
        offset = 0
        for name, linear in zip(names, linears, strict=True):
            if offset % ALIGNMENT:
                return f"the {label} of {name} would not start at a multiple of {ALIGNMENT} bytes"
            offset += getattr(linear, label).nbytes
    return None


def _tensors(linears: Sequence[Any]) -> Iterator[Tensor]:
    for linear in linears:
        yield linear.weight
        if linear.bias is not None:
            yield linear.bias
