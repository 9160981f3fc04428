"""explain: what was done to a model, what was left alone and why, and which kernel each operation uses.

Everything is read off the model as it is now, so a model that was changed after preparing is told as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from hf_rocm import __version__, options
from hf_rocm.device import describe, is_rocm
from hf_rocm.diagnostics.decoding import decoding
from hf_rocm.diagnostics.linears import linears
from hf_rocm.diagnostics.specifications import specifications, where
from hf_rocm.errors import TierUnavailable
from hf_rocm.layers.notes import noted
from hf_rocm.ops.registry import operations
from hf_rocm.overlay import bind
from hf_rocm.overlay.adopt import enclosed_forward
from hf_rocm.tuning.hits import Tuning, tuning_of
from hf_rocm.weights import experts, fuse
from hf_rocm.weights.colwise import mesh_of
from hf_rocm.weights.joined import joined_already
from hf_rocm.weights.prepare import REPORT, families
from hf_rocm.weights.quantize import summary


@dataclass(frozen=True)
class Part:
    """One served class of the model: how many of its instances run ours, are fused, or stay stock, and why."""

    cls: str
    model: str
    delivery: str  # `installed` or `in memory`
    instances: int
    active: int
    group: tuple[str, ...] = ()  # the linear layers that are fused, if the class has such a group
    fused: int = 0
    not_fused: dict[str, int] = field(default_factory=dict)  # reason → instances
    joined: tuple[str, ...] = ()  # layers that are one matrix in the checkpoint already
    gradients: bool = False  # they are on and the weights require them: at this moment the layers run one by one
    stayed_stock: dict[str, int] = field(default_factory=dict)  # reason at the last call → instances
    theirs: int = 0  # instances with a forward of their own, which runs instead of ours


@dataclass(frozen=True)
class Kernel:
    """What serves one operation in one situation, and why nothing faster does."""

    operation: str
    situation: str
    tier: str
    kernel: str
    refused: tuple[tuple[str, str], ...]  # (tier/kernel, reason)


@dataclass(frozen=True)
class Explanation:
    """The whole account: `str()` for people, `to_dict()` for programs (builtins only)."""

    model: str
    state: str
    machine: dict[str, str]
    parts: tuple[Part, ...]
    without_overlay: dict[str, str]
    kernels: tuple[Kernel, ...]
    tuning: Tuning | None = None
    linears: tuple[str, ...] = ()  # shuffled weights and routes, and why not, in sentences
    quantized: str | None = None  # what was brought to 8 bits, and how wrong its layers are
    decoding: tuple[str, ...] = ()  # whether steps of generate are recorded and replayed, and why not, in sentences

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.state}",
            "  " + ", ".join(f"{key} {value}" for key, value in self.machine.items()),
        ]
        if self.parts:
            lines += ["", "parts"]
            lines += [line for part in self.parts for line in _part_lines(part)]
        if self.linears:
            lines += ["", "linear layers", *(f"  {line}" for line in self.linears)]
        if self.quantized is not None:
            lines += ["", f"8 bits: {self.quantized}"]
        if self.decoding:
            lines += ["", "decoding", *(f"  {line}" for line in self.decoding)]
        if self.without_overlay:
            lines += ["", "without an overlay"]
            lines += [f"  {name}: {reason}" for name, reason in self.without_overlay.items()]
        if self.kernels:
            lines += ["", "kernels"]
            lines += [line for kernel in self.kernels for line in _kernel_lines(kernel)]
        if self.tuning is not None:
            lines += ["", f"tuned products: {self.tuning.sentence}"]
        return "\n".join(lines)


def explain(model: nn.Module) -> Explanation:
    """What hf_rocm does in this model at this moment. Loads nothing and runs no layer of the model.

    Routing is what the next call would choose, so a kernel that was never used may be probed here.
    """
    report = model.__dict__.get(REPORT) or {}
    with torch.no_grad():
        mixtures = [module for module in model.modules() if experts.stacked(module) is not None]
    stacked = {id(each) for module in mixtures for each in experts.members(module)}
    parts = tuple(_part(cls, modules, stacked) for cls, modules in _bound_modules(model).items())
    active = any(part.active for part in parts)
    return Explanation(
        model=type(model).__name__,
        state=_state(report, active),
        machine=_machine(model),
        parts=parts,
        without_overlay=_without_overlay(model, report, parts),
        kernels=tuple(_kernels(model)) if active or summary(model) else (),
        tuning=tuning_of(model),
        linears=linears(model, report),
        quantized=summary(model),
        decoding=decoding(model, report),
    )


def _bound_modules(model: nn.Module) -> dict[type, list[nn.Module]]:
    found: dict[type, list[nn.Module]] = {}
    for module in model.modules():
        if bind.binding_of(module) is not None:
            found.setdefault(type(module), []).append(module)
    return found


def _part(cls: type, modules: list[nn.Module], stacked: set[int]) -> Part:
    binding = bind.binding_of(modules[0])
    assert binding is not None
    active = [module for module in modules if bind.mode_of(module) != bind.OFF]
    weighty = [module for module in active if id(module) not in stacked]  # the others' weights are in their mixture's
    with torch.no_grad():
        reasons = _why_not_joined(binding, weighty)
    now = _why_not_joined(binding, weighty)
    in_memory = "__hf_rocm_activation__" in binding.replacement.__globals__
    return Part(
        cls=cls.__name__,
        model=binding.model,
        delivery="in memory" if in_memory else "installed",
        instances=len(modules),
        active=len(active),
        group=binding.fuses or ((experts.LIST,) if binding.experts else ()),
        fused=sum(reason is None for reason in reasons),
        not_fused=dict(Counter(reason for reason in reasons if reason is not None)),
        joined=tuple(dict.fromkeys(name for module in active for name in joined_already(module))),
        gradients=now != reasons,
        stayed_stock=dict(Counter(reason for module in active if (reason := noted(module)) is not None)),
        theirs=sum(_has_its_own_forward(module) for module in active),
    )


def _has_its_own_forward(module: nn.Module) -> bool:
    """Whether a hub kernel, or the user, put a forward on this one module; accelerate's and those of
    tensor parallelism call ours in the end."""
    own = module.__dict__
    forward = enclosed_forward(own.get("_old_forward" if "_hf_hook" in own else "forward"))
    if forward is None:
        return False
    return getattr(getattr(forward, "__func__", forward), "__hf_rocm_binding__", None) is None


def _why_not_joined(binding: bind.Binding, modules: list[nn.Module]) -> list[str | None]:
    if binding.experts:
        return [experts.why_not(module, binding.experts) for module in modules]
    return [fuse.why_not(module, binding.fuses) for module in modules] if binding.fuses else []


def _state(report: dict[str, Any], active: bool) -> str:
    if active:
        return "served by hf_rocm, forced on this machine" if report.get("forced") else "served by hf_rocm"
    if report:
        return "stock, because none of its layers has an overlay that can be used"
    if not is_rocm() and not options.force_requested():
        return "stock, because this PyTorch is not a ROCm build and force was not asked for"
    return "stock: not prepared, or restored (hf_rocm.prepare(model) changes that)"


def _without_overlay(model: nn.Module, report: dict[str, Any], parts: tuple[Part, ...]) -> dict[str, str]:
    """Model families among the layers that nothing serves, and why."""
    refused = dict(report.get("refused", {}))
    served = {part.model for part in parts}
    if report:
        for name in sorted(families(model) - served - refused.keys()):
            refused[name] = "hf_rocm has no overlay of this model"
    return refused


def _machine(model: nn.Module) -> dict[str, str]:
    import transformers

    facts = {"hf_rocm": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    facts["ROCm"] = torch.version.hip or "none"
    owner, first = next(_parameters(model), (model, None))
    if first is not None:
        place = where(owner, first)
        device = describe(place)
        facts["device"] = f"{place} ({device.arch})" if device.arch else str(place)
        facts["dtype"] = str(first.dtype).removeprefix("torch.")
    mesh = mesh_of(model)
    if mesh is not None:
        facts["tensor parallel"] = f"rank {mesh.get_local_rank()} of {mesh.size()}"
    return facts


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    return ((module, each) for module in model.modules() for each in module.parameters(recurse=False))


def _kernels(model: nn.Module) -> list[Kernel]:
    known = operations()
    found = []
    for operation, situation, key in specifications(model):
        try:
            choice = known[operation].choose(key)
        except TierUnavailable as error:
            refused = tuple((label, reason) for label, reason in error.facts.items() if label != "call")
            found.append(Kernel(operation, situation, "none", error.message, refused))
            continue
        refused = tuple((f"{each.tier}/{each.name}", each.reason) for each in choice.refusals)
        found.append(Kernel(operation, situation, choice.implementation.tier, choice.implementation.name, refused))
    return found


def _part_lines(part: Part) -> list[str]:
    lines = [f"  {part.cls} × {part.instances}  overlay of {part.model}, {part.delivery}"]
    if part.active < part.instances:
        lines.append(f"    {part.instances - part.active} stay stock: not prepared, or restored")
    if part.group and part.active:
        lines.append(f"    fused {part.fused} of {part.active}: {' + '.join(part.group)}")
        if part.gradients:
            lines.append("    one by one while gradients are on: call the model under torch.inference_mode()")
        lines += [f"    not fused × {count}: {reason}" for reason, count in part.not_fused.items()]
    if part.joined:
        lines.append(f"    one matrix in the checkpoint already: {', '.join(part.joined)}")
    lines += [f"    last call stock × {count}: {reason}" for reason, count in part.stayed_stock.items()]
    if part.theirs:
        lines.append(f"    not ours × {part.theirs}: a forward that was put there runs (a hub kernel's, or yours)")
    return lines


def _kernel_lines(kernel: Kernel) -> list[str]:
    lines = [f"  {kernel.operation} ({kernel.situation}): {kernel.tier}, {kernel.kernel}"]
    names: dict[str, list[str]] = {}
    for name, reason in kernel.refused:
        names.setdefault(reason, []).append(name)
    return lines + [f"    not {', '.join(each)}: {reason}" for reason, each in names.items()]
