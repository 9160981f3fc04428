"""Recognise linear layers that transformers' tensor parallelism shards column-wise (`colwise`).

There are three forms: hooks over DTensors up to transformers 5.0, hooks over plain parameters from 5.1 to 5.15, and an
instance forward over DTensors in later releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm.layers.grouped_linear import hooks_of
from hf_rocm.weights.eligible import NO_PARAMETER, group_refusal, is_stock, tensor_refusal
from hf_rocm.weights.fused_storage import is_aliased

_FEATURE = "tensor_parallel"

# The attribute of a DTensor that contains this rank's part.
_LOCAL = "_local_tensor"


def local(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter, or the parameter itself if it is not a DTensor."""
    part: Tensor = getattr(parameter, _LOCAL, parameter)
    return part


def mesh_of(model: nn.Module) -> Any:
    """Return the ranks that this model's layers are sharded over, as a one-dimensional DeviceMesh, or None."""
    # With a mesh manager, _device_mesh is a slice, which older releases of PyTorch can't slice.
    manager = getattr(model, "_mesh_manager", None)
    mesh: Any = getattr(model, "_device_mesh", None) if manager is None else manager.get_mesh("tp")
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is not None and mesh.ndim > 1:
        mesh = mesh["tp"] if "tp" in names else None
    elif names and "tp" not in names:
        # transformers 5.15 to 5.17 also set a mesh for other kinds of parallelism.
        return None
    return mesh if mesh is not None and mesh.size() > 1 else None


def is_sharded(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether one of these children has a DTensor as its weight, or runs code of transformers' tensor parallelism."""
    linears = [linear for linear in (module._modules.get(name) for name in names) if linear is not None]
    return any(
        hasattr(linear._parameters.get("weight"), _LOCAL)
        or any(map(is_transformers, (linear.__dict__.get("forward"), *hooks_of(linear))))
        for linear in linears
    )


def refusal(module: nn.Module, names: Sequence[str]) -> str | None:
    """Return why this rank's rows of these layers can't be fused, as a sentence, or None."""
    from hf_rocm import features

    reason = features.refuses(_FEATURE)
    if reason is not None:
        return reason
    rows, meshes = [], []
    for name in names:
        linear: Any = module._modules.get(name)
        if linear is None:
            return f"there is no {name}"
        reason = _linear_refusal(linear)
        if reason is not None:
            return f"{name} {reason}"
        meshes.append(getattr(linear.weight, "device_mesh", None))
        bias = linear._parameters["bias"]
        rows.append(SimpleNamespace(weight=local(linear.weight), bias=None if bias is None else local(bias)))
    if len(rows) < 2:
        return "there is nothing to fuse in fewer than two layers"
    if any(mesh != meshes[0] for mesh in meshes):
        return "its layers are sharded over different ranks"
    return group_refusal(names, rows)


def _linear_refusal(linear: Any) -> str | None:
    """Return why one layer can't be fused, as a sentence without its subject, or None."""
    if type(linear) is not Linear:
        return f"is of type {type(linear).__module__}.{type(linear).__qualname__}, not a plain nn.Linear"
    if "weight" not in linear._parameters:
        return NO_PARAMETER
    if "forward" not in linear.__dict__ and not hooks_of(linear):
        return "has a weight that is a DTensor and is gathered for each call, as in FSDP2"
    for label, parameter in linear._parameters.items():
        if parameter is None and label == "bias":
            continue
        # On the CPU, this may be a slice of a tensor from the checkpoint.
        own = local(parameter)
        reason = _placement_refusal(parameter) or tensor_refusal(own, alone=not is_aliased(own))
        if reason is not None:
            return f"has a {label} that {reason}"
    return None if _keeps_its_part(linear) else "is not run by transformers' own column-wise style"


def _placement_refusal(parameter: Any) -> str | None:
    if not hasattr(parameter, _LOCAL):
        return None if type(parameter) is nn.Parameter else f"is of type {type(parameter).__name__}, not Parameter"
    if len(parameter.placements) == 1 and parameter.placements[0].is_shard(0):
        return None
    return f"has the placements {parameter.placements}, not a single Shard(0)"


def _keeps_its_part(linear: Any) -> bool:
    """Whether the layer takes the whole input and returns this rank's part of the output as a plain tensor.

    Up to 5.15 transformers uses a pair of hooks, and later an instance forward. These functions are closures over their
    settings.
    """
    hooks = hooks_of(linear)
    forward = linear.__dict__.get("forward")
    if forward is None:
        return len(hooks) == 2 and all(map(is_transformers, hooks)) and _is_colwise(*map(_enclosed, hooks))
    if hooks or not is_transformers(forward):
        return False
    inside = _variables(forward)
    style: Any = inside.get("self")
    return (
        _is_style(style)
        and is_stock(inside.get("original_forward"), linear)
        and style.use_local_output is True
        and _layout(style.input_layouts) == ("replicate",)
        and _layout(style.output_layouts) == ("shard", -1)
    )


def _is_colwise(before: Any, after: Any) -> bool:
    """Whether these functions, which the two hooks call, are those of a colwise style.

    Up to 5.0 the functions are partials; in later releases they are methods of a style.
    """
    functions = [function.func if isinstance(function, partial) else function for function in (before, after)]
    names = [getattr(function, "__qualname__", "") for function in functions]
    if names != ["ColwiseParallel._prepare_input_fn", "ColwiseParallel._prepare_output_fn"]:
        return False
    if not isinstance(before, partial):
        style: Any = getattr(before, "__self__", None)
        return _is_style(style) and getattr(after, "__self__", None) is style and style.gather_output is False
    (given, desired), (returned, use_local_output) = before.args, after.args
    whole = _layout(given) == _layout(desired) == ("replicate",)
    return whole and _layout(returned) == ("shard", -1) and use_local_output is True


def _is_style(style: Any) -> bool:
    return type(style).__name__ == "ColwiseParallel" and is_transformers(type(style))


def _layout(given: Any) -> tuple[object, ...] | None:
    """Return a placement, or a tuple of one, as plain values, or None if it is neither sharded nor replicated."""
    placement = given[0] if isinstance(given, tuple) and len(given) == 1 else given
    if not hasattr(placement, "is_shard"):
        return None
    if placement.is_shard():
        return "shard", placement.dim
    return ("replicate",) if placement.is_replicate() else None


def is_transformers(function: Any) -> bool:
    """Whether a function (a hook or a forward) or class belongs to transformers' tensor parallelism."""
    return str(getattr(function, "__module__", "")).startswith(
        ("transformers.integrations.tensor_parallel", "transformers.distributed.tensor_parallel")
    )


def _enclosed(hook: Any) -> Any:
    """The function in the closure of one of `distribute_module`'s hooks."""
    inside = _variables(hook)
    return inside.get("input_fn", inside.get("output_fn"))


def _variables(function: Any) -> dict[str, Any]:
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
