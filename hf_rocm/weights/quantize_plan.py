"""Which linear layers of a model go to 8 bits, and which together: a plan, and a reason for each that is left."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_rocm.overlay import bind
from hf_rocm.weights.eligible import linear_refusal
from hf_rocm.weights.sharing import first_shared, shared

# Parts of a name that stand for what decides or is rarely run: a router's rounding sends tokens elsewhere.
_STAYS = {
    "gate": "it is a router",
    "router": "it is a router",
    "shared_expert_gate": "it is a router",
    "experts": "experts stay as they are",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MULTIPLE = 16  # of N and K: what every 8-bit product needs


class Group(NamedTuple):
    """Layers of one module that will lie in one weight."""

    module: nn.Module
    path: str
    names: tuple[str, ...]


def plan(model: nn.Module, exclude: Sequence[str]) -> tuple[list[Group], dict[str, str]]:
    """What will be quantised together, and every other linear layer with the reason why it isn't."""
    others, left, found = shared(model), dict[str, str](), list[Group]()
    repeated = tuple(path + "." for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    wide = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    wide += tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for path, module in model.named_modules():
        if any(name.endswith("proj") and each.dim() == 3 for name, each in module.named_parameters(recurse=False)):
            left[path] = _STAYS["experts"]  # all of them in one tensor
        eligible = []
        for name, child in module._modules.items():
            if not isinstance(child, nn.Linear):
                continue
            full = f"{path}.{name}" if path else name
            reason = _stays(full, child, repeated, wide, exclude, others)
            if reason is None:
                eligible.append(name)
            else:
                left[full] = reason
        binding = bind.binding_of(module)
        together = tuple(binding.fuses) if binding is not None else ()
        if together and set(together) <= set(eligible) and _alike(module, together):
            found.append(Group(module, path, together))
            eligible = [name for name in eligible if name not in together]
        found += [Group(module, path, (name,)) for name in eligible]
    return found, left


def _stays(
    path: str,
    linear: nn.Linear,
    repeated: tuple[str, ...],
    wide: tuple[str, ...],
    exclude: Sequence[str],
    others: dict[int, str],
) -> str | None:
    """Why this layer keeps its dtype, or None."""
    parts = path.split(".")
    for each in exclude:
        if each in parts or fnmatch.fnmatchcase(path, each):
            return f"excluded by {each!r}"
    if not path.startswith(repeated):
        return "it is no part of a repeated block"
    for part in parts:
        if part in _STAYS:
            return _STAYS[part]
        if part in wide:
            return "its model keeps it in fp32"
    if parts[-1] == "base_layer":
        return "it is the base of an adapter, which may be merged into it"
    reason = linear_refusal(linear)
    if reason is not None:
        return f"it {reason}"
    weight = linear.weight
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}"
    if weight.shape[0] % _MULTIPLE or weight.shape[1] % _MULTIPLE:
        return f"{weight.shape[0]} × {weight.shape[1]} are no multiples of {_MULTIPLE}"
    return first_shared(linear.parameters(), others)


def _alike(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether these layers can lie in one weight."""
    linears: list[Any] = [module._modules[name] for name in names]
    kinds = {(each.in_features, each.weight.dtype, each.weight.device, each.bias is None) for each in linears}
    return len(kinds) == 1
