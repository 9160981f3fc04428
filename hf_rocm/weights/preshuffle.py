"""Shuffle the weights of a whole model for aiter, as copies or in place, and undo it.

A copy costs memory, so copies are made only within the user's budget. Copies of linear layers serve GEMMs with many
rows, and copies of experts serve any number of tokens. With a threshold of 0 rows, the shuffled weight of a linear
layer replaces the original and needs no additional memory, except for a temporary copy of one group's weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm import budget as budgets
from hf_rocm import options
from hf_rocm.layers.grouped_linear import live
from hf_rocm.layers.weight_group import SLOT, WeightGroup, kind_in
from hf_rocm.ops import registry
from hf_rocm.ops.shuffled import shuffled_refuses
from hf_rocm.weights import experts_shuffled, preshuffle_heuristics
from hf_rocm.weights.eligible import linear_refusal
from hf_rocm.weights.fuse import Fused
from hf_rocm.weights.fused_storage import is_aliased
from hf_rocm.weights.shuffled_copy import ShuffledCopy, clear_copied, unwatch
from hf_rocm.weights.shuffled_parameter import ShuffledGroup, ShuffledLinear
from hf_rocm.weights.tied_weights import first_shared, shared


class Settings(NamedTuple):
    """Validated settings. budget: bytes. threshold: rows; 0 replaces the original, -1 shuffles nothing."""

    mode: str
    budget: int
    threshold: int


def settings(model: nn.Module, mode: Any = None, budget: Any = None, before: Any = None) -> Settings:
    """Validate mode and budget, and return all settings.

    If neither is given, the settings of the earlier preparation are used, if there was one. Otherwise an argument that
    is not given defaults to the corresponding option.

    before: the report of the earlier `preshuffle`, or None. Raises `OptionError`.
    """
    if mode is None and budget is None and before is not None:
        return Settings(*(before[name] for name in Settings._fields))
    current = options.current()
    requested = current.preshuffle_budget if budget is None else budget
    weights = sum(parameter.nbytes for parameter in model.parameters()) if requested else 0
    source = "budget=" if budget is not None else "HF_ROCM_PRESHUFFLE_BUDGET="
    return Settings(
        current.preshuffle if mode is None else options.preshuffle_mode(mode),
        budgets.in_bytes(requested, weights, source=source),
        current.preshuffle_threshold,
    )


def preshuffle(model: nn.Module, wanted: Settings) -> dict[str, Any]:
    """Shuffle the eligible weights of a model, as copies or in place. Returns a report in plain builtins.

    All weights are restored if the mode is `off`, the threshold is negative, or copies have no budget. Otherwise,
    weights that were shuffled with other settings are restored first. Layers that were shuffled with the same settings
    are not restored, and stale copies are updated; experts are shuffled again.
    """
    if wanted.mode == "off" or wanted.threshold < 0 or not (wanted.budget or wanted.threshold == 0):
        unshuffle(model)
        return _report(wanted, {}, {}, 0)
    done: dict[str, str] = {}
    skipped: dict[str, str] = {}
    used = 0
    others = shared(model)
    grouped = _inside_experts(model)
    for path, module in model.named_modules():
        if id(module) in grouped:
            continue
        if experts_shuffled.is_moe(module):
            reason, cost = _shuffle_experts(module, wanted, wanted.budget - used, others)
            if reason is None:
                done[f"{path} (experts)"] = "a copy"
                used += cost
            else:
                skipped[f"{path} (experts)"] = reason
        names = _names(module)
        if names:
            grouped.update(id(module._modules[name]) for name in names)
        elif type(module) is not Linear:
            continue
        label = f"{path} ({' + '.join(names)})" if names else path
        reason, cost = _shuffle(module, names, wanted, wanted.budget - used, others, path)
        if reason is None:
            done[label] = "in place of the original" if wanted.threshold == 0 else "a copy"
            used += cost
        else:
            skipped[label] = reason
    return _report(wanted, done, skipped, used)


def unshuffle(model: nn.Module) -> None:
    """Restore every shuffled weight: the same parameters with the same bytes."""
    for module in model.modules():
        group = _group_in(module)
        if group is not None:
            group.unshuffle(module)
        clear_copied(module)
    unwatch()


def in_force(model: nn.Module) -> int:
    """Count the GEMMs of the model that use shuffled weights now, for `explain`."""
    groups = [(module, _group_in(module)) for module in model.modules()]
    members = {
        id(part.layer(module))
        for module, group in groups
        if group is not None and _runs_shuffled(module, group)
        for part in group.parts
    }
    return sum(shuffled_weight(module) is not None for module in model.modules() if id(module) not in members)


def shuffled_weight(module: nn.Module) -> tuple[Tensor, Tensor | None, str] | None:
    """Return (shuffled weight [N, K], bias, the names of its group) for `explain`, or None if the module uses none."""
    group = _group_in(module)
    data = None if group is None else group.shuffled_data(module)
    if group is None or data is None:
        return None
    if group.names:
        return data, group.bias, f"{' + '.join(group.names)}, "
    return data, module._parameters["bias"], ""


def _runs_shuffled(module: nn.Module, group: WeightGroup) -> bool:
    return bool(group.names) and group.shuffled_data(module) is not None


def _group_in(module: nn.Module) -> WeightGroup | None:
    group = module.__dict__.get(SLOT)
    return group if isinstance(group, WeightGroup) else None


def _inside_experts(model: nn.Module) -> set[int]:
    """The ids of all modules inside stacked experts, which other kernels read as one block in their own layout."""
    kinds = ((module, kind_in(module)) for module in model.modules())
    return {id(member) for module, kind in kinds if kind is not None for member in kind.covers(module)}


def _names(module: nn.Module) -> tuple[str, ...]:
    """The names of the layers that this module runs as one GEMM with plain or shuffled weights, if any."""
    with torch.no_grad():
        group = live(module)
    return group.names if isinstance(group, (Fused, ShuffledGroup)) else ()


def _shuffle(
    module: nn.Module, names: tuple[str, ...], wanted: Settings, left: int, others: dict[int, str], path: str
) -> tuple[str | None, int]:
    """Shuffle one fused group or one linear layer. Returns (refusal or None, bytes of the copy)."""
    in_place = wanted.threshold == 0
    if _is_shuffled(module, names, wanted):
        copy = _copy_of(module)
        return None, 0 if in_place or copy is None else copy.extra_bytes(module)
    _clear(module, names)
    with torch.no_grad():
        group = live(module) if names else None
    if names and not isinstance(group, Fused):
        return "its layers don't run as one GEMM", 0
    if group is None:
        reason = _linear_refuses(module, others, path)
        if reason is not None:
            return reason, 0
    weight: Any = module._parameters["weight"] if group is None else group.weight
    bias: Any = module._parameters["bias"] if group is None else group.bias
    parameters = [weight] if group is None else [module._modules[name].weight for name in names]  # type: ignore[union-attr]
    reason = _refuses(parameters, weight, bias, wanted, group)
    if reason is not None:
        return reason, 0
    if any(is_aliased(parameter) for parameter in parameters):
        return "other tensors share the memory of its weights (another model, or a state dict in use?)", 0
    if in_place:
        del group, weight
        return (ShuffledGroup if names else ShuffledLinear).form(module, names), 0
    if weight.nbytes > left:
        return f"a copy takes {weight.nbytes} bytes, but only {left} bytes of the budget are left", 0
    if isinstance(group, Fused):
        group.copy = ShuffledCopy(weight, parameters, wanted.threshold)
    else:
        ShuffledCopy.form(module, (), wanted.threshold)
    return None, weight.nbytes


def _shuffle_experts(module: nn.Module, wanted: Settings, left: int, others: dict[int, str]) -> tuple[str | None, int]:
    """Make shuffled copies of experts, which serve any number of tokens. Returns (refusal or None, bytes)."""
    group = _group_in(module)
    if group is not None:
        # Experts are always shuffled again.
        group.unshuffle(module)
    parameters = [parameter for member in module.modules() for parameter in member.parameters(recurse=False)]
    reason = first_shared(parameters, others)
    if reason is None and wanted.mode == "auto":
        reason = "no gain is known for experts: preshuffle='all' shuffles them"
    return (reason, 0) if reason is not None else experts_shuffled.shuffle(module, left)


def _is_shuffled(module: nn.Module, names: tuple[str, ...], wanted: Settings) -> bool:
    """Whether the weight is shuffled with these settings. A stale copy is updated.

    The values are compared, because version counters miss writes through `.data`.
    """
    group = _group_in(module)
    if wanted.threshold == 0:
        kind = ShuffledGroup if names else ShuffledLinear
        return group is not None and type(group) is kind and group.shuffled_data(module) is not None
    copy = _copy_of(module)
    if copy is None or copy.threshold != wanted.threshold:
        return False
    linears: list[Any] = [module._modules[name] for name in names] if names else [module]
    weights = [linear._parameters["weight"] for linear in linears]
    if not all(type(weight) is nn.Parameter for weight in weights) or not copy.follows(weights):
        return False
    if copy.shuffled is not None and not torch.equal(copy.shuffled.plain(), copy.source):
        copy.renew()
    return True


def _copy_of(module: nn.Module) -> ShuffledCopy | None:
    group = module.__dict__.get(SLOT)
    copy = group.copy if isinstance(group, Fused) else group
    return copy if isinstance(copy, ShuffledCopy) else None


def _clear(module: nn.Module, names: tuple[str, ...]) -> None:
    """Restore weights that were shuffled with other settings, or before their layers formed a group."""
    for member in (*(module._modules[name] for name in names), module):
        group = None if member is None else _group_in(member)
        if member is not None and group is not None:
            group.unshuffle(member)
        elif member is not None:
            clear_copied(member)


def _linear_refuses(linear: nn.Module, others: dict[int, str], path: str) -> str | None:
    reason = linear_refusal(linear)
    if reason is not None:
        return f"it {reason}"
    if path.rpartition(".")[2] == "base_layer":
        return "it is the base of an adapter, which may be merged into it"
    return first_shared(linear._parameters.values(), others)


def _refuses(parameters: list[Any], weight: Any, bias: Any, wanted: Settings, group: WeightGroup | None) -> str | None:
    """Return the reason why this weight is not shuffled, apart from the budget, or None."""
    if any(parameter.is_inference() for parameter in parameters):
        return "its weights were created under inference_mode, which does not count writes to them"
    if group is not None and any(size % 16 for size in group.sizes):
        return "the output sizes of its layers are not multiples of 16"
    reason = shuffled_refuses(weight, bias)
    if reason is None and wanted.mode == "auto":
        reason = preshuffle_heuristics.unknown(weight, registry.device_of(weight))
    return reason


def _report(wanted: Settings, done: dict[str, str], skipped: dict[str, str], used: int) -> dict[str, Any]:
    return {**wanted._asdict(), "shuffled": done, "skipped": skipped, "bytes": used}
