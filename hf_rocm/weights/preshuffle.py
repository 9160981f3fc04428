"""Preshuffling a whole model: which weights get aiter's order, as a copy or in place, and the way back.

A copy costs memory, so there is none unless the user grants a budget, and it serves products of many rows. With a
threshold of 0 rows the shuffled weight replaces the original and costs nothing. Memory peaks at one layer's weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_rocm import options
from hf_rocm.ops import registry
from hf_rocm.ops.shuffled import shuffled_refuses
from hf_rocm.weights import budget as budgets
from hf_rocm.weights import experts, experts_shuffled, gain, routed
from hf_rocm.weights.eligible import linear_refusal
from hf_rocm.weights.fuse import STATE, fused
from hf_rocm.weights.kept import SHUFFLED, Kept, unwatch
from hf_rocm.weights.replaced import GROUP, Group, Replaced, break_up, is_group, replace, replace_group
from hf_rocm.weights.sharing import first_shared, shared


class Settings(NamedTuple):
    """What was asked for. budget: bytes; threshold: rows, 0 replaces, -1 shuffles nothing."""

    mode: str
    budget: int
    threshold: int


def settings(model: nn.Module, mode: Any = None, budget: Any = None, before: Any = None) -> Settings:
    """The arguments, checked; without any what the model was prepared with before; else the options.

    before: the account of last time, if there was one. Raises `OptionError`.
    """
    if mode is None and budget is None and before is not None:
        return Settings(*(before[name] for name in Settings._fields))
    current = options.current()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    source = "budget=" if budget is not None else "HF_ROCM_PRESHUFFLE_BUDGET="
    return Settings(
        current.preshuffle if mode is None else options.preshuffle_mode(mode),
        budgets.in_bytes(current.preshuffle_budget if budget is None else budget, weights, source=source),
        current.preshuffle_threshold,
    )


def preshuffle(model: nn.Module, asked: Settings) -> dict[str, Any]:
    """Shuffle what is eligible, in place. Returns the account of it in plain builtins.

    Shuffled before with other settings: that is undone first. With the same: what is still in force stays.
    """
    if asked.mode == "off" or asked.threshold < 0 or not (asked.budget or asked.threshold == 0):
        unshuffle(model)
        return _account(asked, {}, {}, 0)
    done: dict[str, str] = {}
    skipped: dict[str, str] = {}
    used = 0
    others = shared(model)
    grouped = _inside_experts(model)
    for path, module in model.named_modules():
        if id(module) in grouped:
            continue
        if experts_shuffled.is_mixture(module):
            reason, cost = _shuffle_experts(module, asked, asked.budget - used, others)
            if reason is None:
                done[f"{path} (experts)"] = "a copy"
                used += cost
            else:
                skipped[f"{path} (experts)"] = reason
        names = _group(module)
        if names:
            grouped.update(id(module._modules[name]) for name in names)
        elif type(module) is not nn.Linear:
            continue
        label = f"{path} ({' + '.join(names)})" if names else path
        reason, cost = _shuffle(module, names, asked, asked.budget - used, others, path)
        if reason is None:
            done[label] = "in place of the original" if asked.threshold == 0 else "a copy"
            used += cost
        else:
            skipped[label] = reason
    return _account(asked, done, skipped, used)


def unshuffle(model: nn.Module) -> None:
    """Take every shuffled weight back: the same parameters, the same bytes."""
    for module in model.modules():
        experts_shuffled.unshuffle(module)
        break_up(module)
        kept = getattr(module.__dict__.get(STATE), "kept", None)
        if kept is not None:
            kept.drop()
            module.__dict__[STATE].kept = None
        if SHUFFLED in module.__dict__:
            _unshuffle_linear(module)
    unwatch()


def _unshuffle_linear(linear: nn.Module) -> None:
    held = linear.__dict__.get(SHUFFLED)
    if isinstance(held, Kept):
        held.drop()
    elif isinstance(held, Replaced):
        held.weight.stock()
    linear.__dict__.pop(SHUFFLED, None)
    routed.release(linear)


def in_force(model: nn.Module) -> int:
    """How many products of the model run on shuffled weights at this moment. For `explain`."""
    groups = [module.__dict__[GROUP] for module in model.modules() if GROUP in module.__dict__]
    members = {id(weight) for group in groups if isinstance(group, Group) for weight in group.weights}
    return sum(
        shuffled_weight(module) is not None
        for module in model.modules()
        if id(module._parameters.get("weight")) not in members
    )


def shuffled_weight(module: nn.Module) -> tuple[Tensor, Tensor | None, str] | None:
    """(shuffled [N, K], bias, the names of a group or nothing) of a module that runs on one now. For `explain`."""
    group = module.__dict__.get(GROUP)
    if isinstance(group, Group) and group.intact(module):
        return group.whole.data, group.bias, f"{' + '.join(group.names)}, "
    held: Any = module.__dict__.get(STATE)
    kept = getattr(held, "kept", None)
    if kept is not None and kept.shuffled is not None:
        return kept.shuffled.data, held.bias, f"{' + '.join(held.names)}, "
    alone: Any = module.__dict__.get(SHUFFLED)
    if isinstance(alone, Replaced) and module._parameters.get("weight") is not alone.weight:
        return None
    if isinstance(alone, (Kept, Replaced)) and alone.shuffled is not None:
        return alone.shuffled.data, module._parameters["bias"], ""
    return None


def _inside_experts(model: nn.Module) -> set[int]:
    """Experts that are stacked are read as one block, by kernels with an order of their own."""
    mixtures = [module for module in model.modules() if experts.STATE in module.__dict__]
    members = [member for mixture in mixtures for member in experts.members(mixture)]
    return {id(each) for member in members for each in member.modules()}


def _group(module: nn.Module) -> tuple[str, ...]:
    """The names of the layers that this module runs as one product, if it does."""
    group = module.__dict__.get(GROUP)
    if isinstance(group, Group) and group.intact(module):
        return group.names
    with torch.no_grad():
        held = fused(module)
    return () if held is None else held.names


def _shuffle(
    module: nn.Module, names: tuple[str, ...], asked: Settings, left: int, others: dict[int, str], path: str
) -> tuple[str | None, int]:
    """(why not, bytes): shuffles one group (names) or one linear layer."""
    in_place = asked.threshold == 0
    if _is_so(module, names, asked):
        return None, 0 if in_place else _kept(module).nbytes
    _clear(module, names)
    with torch.no_grad():
        held = fused(module) if names else None
    if names and held is None:
        return "its layers don't run as one product", 0
    if held is None:
        reason = _linear_refuses(module, others, path)
        if reason is not None:
            return reason, 0
    weight: Any = module._parameters["weight"] if held is None else held.weight
    bias: Any = module._parameters["bias"] if held is None else held.bias
    parameters = [weight] if held is None else [module._modules[name].weight for name in names]  # type: ignore[union-attr]
    reason = _refuses(parameters, weight, bias, asked, held)
    if reason is not None:
        return reason, 0
    if in_place:
        if held is None:
            linear: Any = module
            replace(linear)
            routed.attach(linear)
        else:
            _replace_group(module, names, held)
        return None, 0
    if weight.nbytes > left:
        return f"a copy takes {weight.nbytes} bytes, and {left} of the budget are left", 0
    kept = Kept(weight, parameters, asked.threshold)
    if held is None:
        module.__dict__[SHUFFLED] = kept
        routed.attach(module)
    else:
        held.kept = kept
    return None, weight.nbytes


def _shuffle_experts(module: nn.Module, asked: Settings, left: int, others: dict[int, str]) -> tuple[str | None, int]:
    """(why not, bytes): copies only, whatever the threshold, and for any number of tokens."""
    experts_shuffled.unshuffle(module)  # of other settings, or of weights that were written to since
    parameters = [parameter for each in module.modules() for parameter in each.parameters(recurse=False)]
    reason = first_shared(parameters, others)
    if reason is None and asked.mode == "auto":
        reason = "no gain is known for experts: preshuffle='all' shuffles them"
    return (reason, 0) if reason is not None else experts_shuffled.shuffle(module, left)


def _is_so(module: nn.Module, names: tuple[str, ...], asked: Settings) -> bool:
    """Whether it is shuffled as asked for already. A copy's contents are compared: `.data` may have been written."""
    if asked.threshold == 0:
        if names:
            return is_group(module, names)
        held = module.__dict__.get(SHUFFLED)
        return isinstance(held, Replaced) and module._parameters.get("weight") is held.weight
    kept = _kept(module)
    if not isinstance(kept, Kept) or kept.threshold != asked.threshold:
        return False
    linears: list[Any] = [module._modules[name] for name in names] if names else [module]
    weights = [linear._parameters["weight"] for linear in linears]
    if not all(type(weight) is nn.Parameter for weight in weights) or not kept.follows(weights):
        return False
    if kept.shuffled is not None and not torch.equal(kept.shuffled.plain(), kept.source):
        kept.renew()
    return True


def _kept(module: nn.Module) -> Any:
    return getattr(module.__dict__.get(STATE), "kept", None) or module.__dict__.get(SHUFFLED)


def _clear(module: nn.Module, names: tuple[str, ...]) -> None:
    """Undo what other settings did to this one, or what was done to its layers before they formed a group."""
    break_up(module)
    for name in names:
        child: Any = module._modules[name]
        if SHUFFLED in child.__dict__:
            _unshuffle_linear(child)
    held: Any = module.__dict__.get(STATE)
    if getattr(held, "kept", None) is not None:
        held.kept.drop()
        held.kept = None
    if SHUFFLED in module.__dict__:
        _unshuffle_linear(module)


def _linear_refuses(linear: nn.Module, others: dict[int, str], path: str) -> str | None:
    reason = linear_refusal(linear)
    if reason is not None:
        return f"it {reason}"
    if path.rpartition(".")[2] == "base_layer":
        return "it is the base of an adapter, which may be merged into it"
    return first_shared(linear._parameters.values(), others)


def _refuses(parameters: list[Any], weight: Any, bias: Any, asked: Settings, held: Any) -> str | None:
    """Why this weight isn't shuffled, whatever the budget."""
    if any(parameter.is_inference() for parameter in parameters):
        return "it was made under inference_mode, so writes to it aren't counted"
    if held is not None and any(size % 16 for size in held.sizes):
        return "its layers don't have multiples of 16 outputs"
    reason = shuffled_refuses(weight, bias)
    if reason is None and asked.mode == "auto":
        reason = gain.unknown(weight, registry.device_of(weight))
    return reason


def _replace_group(module: nn.Module, names: tuple[str, ...], held: Any) -> None:
    module.__dict__.pop(STATE, None)
    replace_group(module, names, held)
    for name in names:
        routed.attach(module._modules[name])


def _account(asked: Settings, done: dict[str, str], skipped: dict[str, str], used: int) -> dict[str, Any]:
    return {**asked._asdict(), "shuffled": done, "skipped": skipped, "bytes": used}
