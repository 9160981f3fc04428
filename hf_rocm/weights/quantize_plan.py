"""Plan which layers and experts of a model are quantised together, with a reason for those that are not quantised."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm.overlay import bind
from hf_rocm.weights.eligible import linear_refusal
from hf_rocm.weights.tied_weights import first_shared, shared

# Parts of the names of layers that are not quantised. Rounding a router could send tokens to other experts.
_KEPT_NAMES = {
    "gate": "it is a router",
    "router": "it is a router",
    "shared_expert_gate": "it is a router",
    "experts": "lists of experts are not quantised",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# N and K must be multiples of this for every GEMM.
_MULTIPLE = 16


class Group(NamedTuple):
    """Layers of one module that are quantised into one weight, or one child module of stacked experts."""

    module: nn.Module
    path: str
    names: tuple[str, ...]


def plan(
    model: nn.Module,
    exclude: Sequence[str],
    refuses: Callable[[Tensor], str | None],
    *,
    head: bool = False,
    experts: Callable[[nn.Module], str | None] | None = None,
) -> tuple[list[Group], dict[str, str]]:
    """Return the groups to quantise, and the reasons why other linear layers and stacked experts keep their dtype.

    refuses: a function that returns the reason why a weight can't be encoded, or None. head: also quantise the layer
    that computes the logits. experts: a function that returns the reason why stacked experts keep their dtype, or None.
    Without this function, all stacked experts keep their dtype.
    """
    others, left_out, groups = shared(model), dict[str, str](), list[Group]()
    repeated = tuple(path + "." for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    last = model.get_output_embeddings() if head and hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    fp32_names = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    fp32_names += tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for path, module in model.named_modules():
        eligible = []
        for name, child in module._modules.items():
            full = f"{path}.{name}" if path else name
            inside = child is last or full.startswith(repeated)
            reason: str | None
            if isinstance(child, Linear):
                reason = _name_refusal(full, fp32_names, exclude, _KEPT_NAMES, inside=inside)
                reason = reason or _layer_refusal(child, others) or refuses(child.weight)
            elif child is not None and _is_stacked(child):
                reason = "stacked experts are quantised only in mxfp4"
                if experts is not None:
                    reason = _name_refusal(full, fp32_names, exclude, {}, inside=inside) or experts(child)
                    reason = reason or first_shared(child.parameters(), others)
            else:
                continue
            if reason is None:
                eligible.append(name)
            else:
                left_out[full] = reason
        binding = bind.binding_of(module)
        together = tuple(binding.fuses) if binding is not None else ()
        if together and set(together) <= set(eligible) and _alike(module, together):
            groups.append(Group(module, path, together))
            eligible = [name for name in eligible if name not in together]
        groups += [Group(module, path, (name,)) for name in eligible]
    return groups, left_out


def _is_stacked(module: nn.Module) -> bool:
    """Whether a module has parameters in which the weights of its experts are stacked."""
    return any(name.endswith("proj") and weight.dim() == 3 for name, weight in module.named_parameters(recurse=False))


def _name_refusal(
    path: str, fp32_names: tuple[str, ...], exclude: Sequence[str], reasons: Mapping[str, str], *, inside: bool
) -> str | None:
    """Return the reason why a module with this name keeps its dtype, or None.

    reasons: reasons by parts of names. inside: whether the module is in a repeated block, or is the head.
    """
    parts = path.split(".")
    for pattern in exclude:
        if pattern in parts or fnmatch.fnmatchcase(path, pattern):
            return f"excluded by {pattern!r}"
    if not inside:
        return "it is not part of a repeated block"
    for part in parts:
        if part in reasons:
            return reasons[part]
        if part in fp32_names:
            return "the model keeps it in fp32"
    if parts[-1] == "base_layer":
        return "it is the base of an adapter, which may be merged into it"
    return None


def _layer_refusal(linear: Linear, others: dict[int, str]) -> str | None:
    """Return the reason why this layer keeps its dtype, or None."""
    reason = linear_refusal(linear)
    if reason is not None:
        return f"it {reason}"
    weight = linear.weight
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}"
    if weight.shape[0] % _MULTIPLE or weight.shape[1] % _MULTIPLE:
        return f"its sizes {weight.shape[0]} × {weight.shape[1]} are not multiples of {_MULTIPLE}"
    return first_shared(linear.parameters(), others)


def _alike(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether these layers can be quantised into one weight."""
    linears: list[Any] = [module._modules[name] for name in names]
    kinds = {(item.in_features, item.weight.dtype, item.weight.device, item.bias is None) for item in linears}
    return len(kinds) == 1
