"""Why a group of linear layers can't be fused, in a sentence, or None. Cheap, no side effects, no copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.weights.routed import is_ours

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Compiled kernels are specialised on the addresses of weights being multiples of this.
ALIGNMENT = 16  # bytes

NO_PARAMETER = "has a weight that is no parameter of its own, as in FSDP with use_orig_params=False"


def refusal(module: nn.Module, names: Sequence[str]) -> str | None:
    """Why these children of module can't be fused into one matrix."""
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


def accepted_forward(linear: nn.Module) -> bool:
    """Whether the instance has no forward of its own, or only what accelerate leaves where it moves nothing.

    `device_map="auto"` over several devices puts a hook on every layer, also where nothing is offloaded; a hook that
    was taken off leaves the class's forward as an attribute.
    """
    forward = linear.__dict__.get("forward")
    if forward is None or is_stock(forward, linear):
        return True
    hook = linear.__dict__.get("_hf_hook")
    weight = linear._parameters.get("weight")
    return (
        isinstance(forward, functools.partial)
        and getattr(forward.func, "__module__", None) == "accelerate.hooks"
        and bool(forward.args)
        and forward.args[0] is linear
        and is_stock(linear.__dict__.get("_old_forward"), linear)
        and (type(hook).__module__, type(hook).__qualname__) == ("accelerate.hooks", "AlignDevicesHook")
        and not getattr(hook, "offload", True)
        and weight is not None
        and _same_device(getattr(hook, "execution_device", None), weight.device)
    )


def is_stock(forward: object, linear: nn.Module) -> bool:
    """Whether it is nn.Linear's own forward of this very instance, or ours, which computes the same."""
    if getattr(forward, "__func__", None) is nn.Linear.forward and getattr(forward, "__self__", None) is linear:
        return True
    return is_ours(forward, linear)


def _same_device(wanted: object, device: torch.device) -> bool:
    if wanted is None:
        return False
    wanted_device = torch.device(wanted)  # type: ignore[call-overload]
    if wanted_device.index is None and wanted_device.type == "cuda":
        return device.type == "cuda" and device.index == torch.cuda.current_device()
    return bool(wanted_device == device)


def linear_refusal(linear: nn.Module) -> str | None:
    """The same for one layer, as the rest of a sentence about it."""
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__module__}.{type(linear).__qualname__}, not a plain nn.Linear"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "has a forward hook"
    if not accepted_forward(linear):
        if "_hf_hook" in linear.__dict__:
            return f"is run by a hook ({type(linear.__dict__['_hf_hook']).__name__}) that may move its weights"
        return "has a forward of its own"
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
        return f"is a {type(parameter).__name__}, not a plain Parameter"
    return tensor_refusal(parameter)


def tensor_refusal(parameter: Tensor, *, alone: bool = False) -> str | None:
    """Why this memory can't become part of a block, as the rest of a sentence about it.

    alone: nothing else lies in its storage, however large that is.
    """
    if parameter.is_meta:
        return "is on the meta device"
    if parameter.dtype not in DTYPES:
        return f"is {parameter.dtype}, and only {', '.join(str(dtype).split('.')[1] for dtype in DTYPES)} are fused"
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
    """Why these can't be one matrix, in a sentence. linears: with a plain weight and bias, each eligible by itself."""
    first = linears[0]
    biased = [name for name, linear in zip(names, linears, strict=True) if linear.bias is not None]
    if biased and len(biased) != len(names):
        return f"only {', '.join(biased)} {'has' if len(biased) == 1 else 'have'} a bias"
    for name, linear in zip(names, linears, strict=True):
        for what, one, other in (
            ("input features", linear.weight.shape[1], first.weight.shape[1]),
            ("dtype", linear.weight.dtype, first.weight.dtype),
            ("device", linear.weight.device, first.weight.device),
            ("inference mode", linear.weight.is_inference(), first.weight.is_inference()),
        ):
            if one != other:
                return f"{name} and {names[0]} differ in {what}: {one} and {other}"
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
