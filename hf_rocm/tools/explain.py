"""explain: hf_rocm's changes to a model, the reasons why other parts stay stock, and the kernel of each operation.

explain reads the current state of the model, including changes that were made after the model was prepared. Some
reasons come from the report of `prepare`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_rocm import __version__, options, patches
from hf_rocm.arguments import require_module
from hf_rocm.device import describe, is_rocm
from hf_rocm.errors import OverlayError, TierUnavailable
from hf_rocm.layers.attention import implementation_replaced
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.layers.grouped_linear import live
from hf_rocm.layers.weight_group import names_in
from hf_rocm.loading.prepare import families, report_of
from hf_rocm.ops.registry import operations
from hf_rocm.overlay import bind
from hf_rocm.overlay.catalog import Overlay
from hf_rocm.overlay.instance_forwards import enclosed_forward
from hf_rocm.tools.decoding import decoding
from hf_rocm.tools.explain_short import NO_OVERLAY, NO_ROCM
from hf_rocm.tools.explain_text import Explanation
from hf_rocm.tools.explanation import Kernel, Part, Stock
from hf_rocm.tools.forwards import forwards
from hf_rocm.tools.linears import linears
from hf_rocm.tools.specifications import device_of, specifications
from hf_rocm.tools.tuning.coverage import tuning_of
from hf_rocm.weights import kinds
from hf_rocm.weights.prefused import fused_in_checkpoint
from hf_rocm.weights.quantize import REPORT as QUANTIZATION
from hf_rocm.weights.quantize import summary
from hf_rocm.weights.tensor_parallel import mesh_of

# Modules that only contain other modules.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def explain(model: nn.Module) -> Explanation:
    """Explain what hf_rocm does in the current state of this model, without loading anything or running its layers.

    The kernels are those that the next call would use, so a first-use check may run here. Returns an `Explanation`.
    Raises `OptionError` if model is not a `torch.nn.Module`.
    """
    require_module(model, "explain")
    options.refresh()
    report = report_of(model)
    with torch.no_grad():
        groups = [module for module in model.modules() if live(module) is not None]
    covered = {id(member) for module in groups for member in kinds.covered(module)}
    parts = tuple(_part(cls, modules, covered) for cls, modules in _bound_modules(model).items())
    active = any(part.active for part in parts)
    served = {binding.model for binding in bind.bindings()}
    overlays = _overlays(families(model) - served)
    return Explanation(
        model=type(model).__name__,
        state=_state(report, active),
        machine=_machine(model),
        parts=parts,
        without_overlay=_without_overlay(model, report, overlays),
        kernels=tuple(_kernels(model)) if active or summary(model) else (),
        prepared=bool(report),
        tuning=tuning_of(model),
        linears=linears(model, report),
        quantized=summary(model),
        not_quantized=dict(Counter(model.__dict__.get(QUANTIZATION, {}).get("left", {}).values())),
        decoding=decoding(model, report),
        forwards=forwards(model, report),
        stock=tuple(_stock(model, groups, report, served, overlays)),
        replaced=tuple(sorted(str(change) for change in patches.replaced())),
    )


def _bound_modules(model: nn.Module) -> dict[type, list[nn.Module]]:
    bound: dict[type, list[nn.Module]] = {}
    for module in model.modules():
        if bind.binding_of(module) is not None:
            bound.setdefault(type(module), []).append(module)
    return bound


def _stock(
    model: nn.Module,
    groups: list[nn.Module],
    report: dict[str, Any],
    served: set[str],
    overlays: dict[str, Overlay | None],
) -> Iterator[Stock]:
    """Yield the modules without a binding, except containers, counted by class and reason, in model order.

    served: the model families with a bound overlay. overlays: the overlay of every other family; None if it has none.
    """
    fused = {id(module._modules.get(name)) for module in groups for name in names_in(module)}
    fused |= {id(child) for module in groups for member in kinds.covered(module) for child in member.modules()}
    unbound = {name: family for family, overlay in overlays.items() if overlay for name in overlay.record.names}
    names: dict[str, set[type]] = {}
    for module in model.modules():
        names.setdefault(type(module).__name__, set()).add(type(module))
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        if bind.binding_of(module) is None and not isinstance(module, _CONTAINERS):
            kind = type(module)
            family = unbound.get(f"{kind.__module__}:{kind.__name__}")
            if id(module) in fused:
                reason = "part of a fused group"
            elif family is None:
                reason = _why_stock(module, served, overlays)
            else:
                reason = _why_unbound(family, report)
            counts[_name(kind) if len(names[kind.__name__]) > 1 else kind.__name__, reason] += 1
    for (cls, reason), instances in counts.items():
        yield Stock(cls, instances, reason)


def _overlays(missing: set[str]) -> dict[str, Overlay | None]:
    """Map model families without a bound overlay to their overlay for this release of transformers, or to None."""
    if not missing:
        return {}
    import transformers

    from hf_rocm.overlay import catalog

    try:
        overlays = catalog.load()
    except OverlayError:
        # `prepare` raises this error.
        return {}
    return {family: overlays.find(family, transformers.__version__) for family in sorted(missing)}


def _why_unbound(family: str, report: dict[str, Any]) -> str:
    if report:
        # `without_overlay` has the reason.
        return f"the overlay of {family} can't be used"
    if is_rocm() or options.force_requested():
        return f"not prepared, and the overlay of {family} is not bound"
    return f"the overlay of {family} is not used on this machine"


def _name(cls: type) -> str:
    """Return a name that distinguishes a class from others of the same name, such as `lora.Linear`.

    The names of PyTorch's classes are returned unchanged.
    """
    if cls.__module__.split(".")[0] == "torch":
        return cls.__name__
    parts = cls.__module__.split(".")
    homes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    home = next((name for name in homes if getattr(sys.modules.get(name), cls.__name__, None) is cls), cls.__module__)
    return f"{home.rpartition('.')[2]}.{cls.__name__}"


def _why_stock(module: nn.Module, served: set[str], overlays: dict[str, Overlay | None]) -> str:
    """Return the reason why a module is stock. served, overlays: as in `_stock`."""
    cls = type(module)
    base = next((base for base in cls.__mro__[1:] if base in bind.bindings_by_class), None)
    if base is not None:
        return f"{cls.__name__} is a subclass of {base.__name__}; only {base.__name__} itself is served"
    origin = cls.__module__.split(".")[0]
    if origin in ("torch", "hf_rocm"):
        return noted(module) or ("PyTorch's own layers" if origin == "torch" else "hf_rocm's own layers")
    if origin != "transformers":
        return f"code of {origin}"
    family = (cls.__module__.split(".") + [""] * 3)[2]
    if overlays.get(family, ...) is None:
        return NO_OVERLAY.format(family)
    if not module._parameters:
        return "no weights outside its layers"
    return "no operation of hf_rocm fits" if family in served else "no overlay"


def _part(cls: type, modules: list[nn.Module], covered: set[int]) -> Part:
    binding = bind.binding_of(modules[0])
    assert binding is not None
    active = [module for module in modules if bind.mode_of(module) != bind.OFF]
    # the weights of covered modules belong to their experts' group
    uncovered = [module for module in active if id(module) not in covered]
    with torch.no_grad():
        reasons = _why_not_joined(binding, uncovered)
    current = _why_not_joined(binding, uncovered)
    in_memory = "__hf_rocm_activation__" in binding.home
    return Part(
        cls=cls.__name__,
        model=binding.model,
        delivery="in memory" if in_memory else "installed",
        instances=len(modules),
        active=len(active),
        group=_label(binding, modules[0]),
        fused=sum(reason is None for reason in reasons),
        not_fused=dict(Counter(reason for reason in reasons if reason is not None)),
        joined=tuple(dict.fromkeys(name for module in active for name in fused_in_checkpoint(module))),
        gradients=current != reasons,
        stayed_stock=dict(Counter(reason for module in active if (reason := noted(module)) is not None)),
        stock_because=bind.refused(cls) or next(filter(None, map(implementation_replaced, active)), None),
        theirs=sum(_has_its_own_forward(module) for module in active),
    )


def _has_its_own_forward(module: nn.Module) -> bool:
    """Return whether a Hub kernel or the user set a forward on this instance.

    Forwards set by accelerate or for tensor parallelism don't count, because they call hf_rocm's forward.
    """
    own = module.__dict__
    forward = enclosed_forward(own.get("_old_forward" if "_hf_hook" in own else "forward"))
    if forward is None:
        return False
    return getattr(getattr(forward, "__func__", forward), "__hf_rocm_binding__", None) is None


def _label(binding: bind.Binding, module: nn.Module) -> tuple[str, ...]:
    fit = kinds.kind_for(module, binding)
    return () if fit is None else tuple(fit[0].label(fit[1]))


def _why_not_joined(binding: bind.Binding, modules: list[nn.Module]) -> list[str | None]:
    if not binding.experts and not binding.fuses:
        return []
    return [kinds.why_not(module, binding) for module in modules]


def _state(report: dict[str, Any], active: bool) -> str:
    if active:
        # There is no report if installed overlays serve a model that was not prepared.
        forced = report.get("forced") or not is_rocm()
        return "served by hf_rocm, forced on this machine" if forced else "served by hf_rocm"
    if report:
        return "stock, because none of its layers has an overlay that can be used"
    if not is_rocm() and not options.force_requested():
        return NO_ROCM
    return "stock: not prepared, or restored (call hf_rocm.prepare(model))"


def _without_overlay(model: nn.Module, report: dict[str, Any], overlays: dict[str, Overlay | None]) -> dict[str, str]:
    """Return the model families and classes that hf_rocm does not serve, and why. overlays: as in `_stock`."""
    refused = dict(report.get("refused", {}))
    for cls in {type(module) for module in model.modules()}:
        if cls in bind.waiting:
            refused[cls.__name__] = str(bind.refused(cls))
    for family, overlay in overlays.items():
        if overlay is None:
            refused.setdefault(family, NO_OVERLAY.format("this model"))
    return refused


def _machine(model: nn.Module) -> dict[str, str]:
    import transformers

    facts = {"hf_rocm": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    facts["ROCm"] = torch.version.hip or "none"
    owner, first = next(_parameters(model), (model, None))
    if first is not None:
        place = device_of(owner, first)
        device = describe(place)
        facts["device"] = f"{place} ({device.arch})" if device.arch else str(place)
        facts["dtype"] = str(first.dtype).removeprefix("torch.")
    mesh = mesh_of(model)
    if mesh is not None:
        facts["tensor parallel"] = f"rank {mesh.get_local_rank()} of {mesh.size()}"
    return facts


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    return ((module, parameter) for module in model.modules() for parameter in module.parameters(recurse=False))


def _kernels(model: nn.Module) -> list[Kernel]:
    known = operations()
    kernels = []
    for operation, situation, key in specifications(model):
        try:
            choice = known[operation].choose(key)
        except TierUnavailable as error:
            refused = tuple((label, reason) for label, reason in error.facts.items() if label != "call")
            kernels.append(Kernel(operation, situation, "none", error.message, refused))
            continue
        refused = tuple((f"{refusal.tier}/{refusal.name}", refusal.reason) for refusal in choice.refusals)
        kernels.append(Kernel(operation, situation, choice.implementation.tier, choice.implementation.name, refused))
    return kernels
