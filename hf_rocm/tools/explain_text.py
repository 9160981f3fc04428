"""The result of `explain`, and its text: a short form by default, the details, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from hf_rocm.overlay.scan import WITHOUT_OVERLAY
from hf_rocm.tools.decoding import by_tier
from hf_rocm.tools.tuning.coverage import Tuning
from hf_rocm.tools.wrapping import width, wrapped

NO_ROCM = "stock, because this PyTorch is not a ROCm build and force is not set"
NO_OVERLAY = "hf_rocm has no overlay for {}"

_REASONS = 6  # the largest number of refusals in the short form
_STOCK = 6  # the largest number of class names on a line of the short form


@dataclass(frozen=True)
class Part:
    """One served class of the model: how many instances run hf_rocm's forward, are fused, or stay stock, and why."""

    cls: str
    model: str
    delivery: str  # `installed` or `in memory`
    instances: int
    active: int
    group: tuple[str, ...] = ()  # the linear layers that are fused, if any
    fused: int = 0
    not_fused: dict[str, int] = field(default_factory=dict)  # reason → instances
    joined: tuple[str, ...] = ()  # layers that are already one matrix in the checkpoint
    gradients: bool = False  # whether the layers run one by one, because gradients are enabled and required by weights
    stayed_stock: dict[str, int] = field(default_factory=dict)  # reason at the last call → instances
    stock_because: str | None = None  # the reason why the whole class runs stock, such as a replaced function
    theirs: int = 0  # instances on which another forward was set, which runs instead of hf_rocm's


@dataclass(frozen=True)
class Kernel:
    """The kernel of one operation in one situation, and why no faster kernel is used."""

    operation: str
    situation: str
    tier: str
    kernel: str
    refused: tuple[tuple[str, str], ...]  # (tier/kernel, reason)


@dataclass(frozen=True)
class Stock:
    """One class of modules that hf_rocm leaves to stock, and why."""

    cls: str
    instances: int
    reason: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain`. `str()` returns the short text, `details()` the long one, `to_dict()` only builtins."""

    model: str
    state: str
    machine: dict[str, str]
    parts: tuple[Part, ...]
    without_overlay: dict[str, str]
    kernels: tuple[Kernel, ...]
    tuning: Tuning | None = None
    linears: tuple[str, ...] = ()  # sentences about shuffled weights, routes and patch embeddings
    quantized: str | None = None  # which layers are quantised, and their error
    not_quantized: dict[str, int] = field(default_factory=dict)  # reason → layers that are not quantised
    decoding: tuple[str, ...] = ()  # whether generate's steps are recorded and replayed, and if not, the reasons
    forwards: tuple[str, ...] = ()  # whether other forwards are recorded and replayed, and if not, the reasons
    stock: tuple[Stock, ...] = ()  # all classes that are not in `parts`, except containers
    replaced: tuple[str, ...] = ()  # functions that other code replaced later, such as `LlamaMLP.forward`

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Return the short form, wrapped to the width of the terminal."""
        return short(self, width())

    __repr__ = __str__

    def details(self) -> str:
        """Return the long text, one fact per line, without wrapping."""
        return details(self)

    def _repr_html_(self) -> str:
        return html(self)


def short(explanation: Explanation, width: int) -> str:
    """Return the summary: the classes, the reasons why some are not served or fused, and the kernels.

    width: the number of columns at which lines are wrapped.
    """
    lines = [*_headline(explanation)]
    if explanation.parts or explanation.stock:
        lines += ["", *_table(explanation)]
    lines += _notes(explanation)
    lines += [""] if explanation.decoding or explanation.forwards or explanation.kernels else []
    if explanation.decoding:
        lines.append(f"generate: {'; '.join(_decoding(explanation.decoding))}")
    if explanation.forwards:
        lines.append(f"forwards: {'; '.join(_decoding(explanation.forwards))}")
    if explanation.kernels:
        lines += _kernels(explanation.kernels)
    if explanation.tuning is not None:
        lines.append(f"tuned GEMMs: {explanation.tuning.sentence}")
    lines += ["", *_next(explanation)]
    return "\n".join(_wrapped(lines, width))


def details(explanation: Explanation) -> str:
    """Return the long text, one fact per line, without wrapping."""
    lines = _headline(explanation)
    if explanation.parts:
        lines += ["", "served classes", *(line for part in explanation.parts for line in _part(part))]
    if explanation.stock:
        lines += ["", "stock classes", *(f"  {one.cls} × {one.instances}: {one.reason}" for one in explanation.stock)]
    if explanation.linears:
        lines += ["", "linear layers", *(f"  {line}" for line in explanation.linears)]
    if explanation.quantized is not None:
        lines += ["", f"quantised: {explanation.quantized}"]
        lines += [f"  not quantised × {count}: {reason}" for reason, count in explanation.not_quantized.items()]
    if explanation.decoding:
        lines += ["", "decoding", *(f"  {line}" for line in explanation.decoding)]
    if explanation.forwards:
        lines += ["", "forwards", *(f"  {line}" for line in explanation.forwards)]
    if explanation.replaced:
        lines += ["", "replaced later by other code, whose function runs first"]
        lines += [f"  {name}" for name in explanation.replaced]
    if explanation.without_overlay:
        lines += ["", "without an overlay"]
        lines += [f"  {name}: {reason}" for name, reason in explanation.without_overlay.items()]
    if explanation.kernels:
        lines += ["", "kernels", *_all_kernels(explanation.kernels)]
    if explanation.tuning is not None:
        lines += ["", f"tuned GEMMs: {explanation.tuning.sentence}"]
    return "\n".join(lines)


def html(explanation: Explanation) -> str:
    """Return the short form as HTML, with the details in a collapsed section."""
    summary = f"<pre>{escape(short(explanation, 100))}</pre>"
    return f"{summary}<details><summary>details</summary><pre>{escape(details(explanation))}</pre></details>"


def _headline(explanation: Explanation) -> list[str]:
    facts = ", ".join(f"{key} {value}" for key, value in explanation.machine.items())
    return [f"{explanation.model}: {explanation.state}", f"  {facts}"]


def _table(explanation: Explanation) -> Iterator[str]:
    """Yield a line for every served class, and then the stock classes by reason."""
    rows = [
        (part.cls, f"{part.active} of {part.instances}", ", ".join(_part_notes(part))) for part in explanation.parts
    ]
    first = max((len(name) for name, _, _ in rows), default=0)
    second = max((len(count) for _, count, _ in rows), default=0)
    for name, count, notes in rows:
        yield f"  {name:<{first}}  {count:<{second}}  {notes}".rstrip()
    reasons: dict[str, list[Stock]] = {}
    for one in explanation.stock:
        reasons.setdefault(one.reason, []).append(one)
    for reason, classes in reasons.items():
        yield f"  stock, {reason}: {_counted(classes)}"


def _counted(classes: list[Stock]) -> str:
    named = [f"{one.cls} × {one.instances}" for one in classes[:_STOCK]]
    rest = len(classes) - len(named)
    return ", ".join([*named, f"and {rest} more class{'es' * (rest > 1)}"] if rest > 0 else named)


def _part_notes(part: Part) -> Iterator[str]:
    if part.group and part.active:
        count = "" if part.fused == part.active else f" in {part.fused}"
        yield f"{'fused' if part.fused else 'not fused'}{count if part.fused else ''}: {' + '.join(part.group)}"
    if part.joined:
        yield f"one matrix in the checkpoint: {' and '.join(part.joined)}"


def _notes(explanation: Explanation) -> Iterator[str]:
    """Yield the reasons why classes are not served or not fused, each reason once with its classes, and other notes.

    The other notes are on linear layers, quantisation, replaced functions and models without an overlay.
    """
    reasons: dict[str, list[str]] = {}
    for part in explanation.parts:
        if part.gradients:
            reasons.setdefault(_gradients(explanation), []).append(part.cls)
        for reason, count in part.not_fused.items():
            reasons.setdefault(f"not fused: {reason}", []).append(f"{part.cls} × {count}")
        for reason, count in part.stayed_stock.items():
            reasons.setdefault(f"stock at the last call: {reason}", []).append(f"{part.cls} × {count}")
        if part.stock_because is not None and part.active:
            reasons.setdefault(f"stock: {part.stock_because}", []).append(f"{part.cls} × {part.active}")
        if part.theirs:
            reasons.setdefault("another forward was set on the instance and runs", []).append(
                f"{part.cls} × {part.theirs}"
            )
    lines = [f"{', '.join(classes)}: {reason}" for reason, classes in reasons.items()]
    lines += [f"linear layers: {line}" for line in explanation.linears]
    if explanation.quantized is not None:
        lines.append(f"quantised: {explanation.quantized}")
    if explanation.replaced:
        lines.append(f"replaced later by other code: {', '.join(explanation.replaced)}")
    listed = {one.reason for one in explanation.stock}
    lines += [
        f"{name}: {reason}"
        for name, reason in explanation.without_overlay.items()
        if NO_OVERLAY.format(name) not in listed
    ]
    if lines:
        yield from ["", *lines]


def _gradients(explanation: Explanation) -> str:
    where, generates = ("in bare calls ", "; generate does this itself") if explanation.decoding else ("", "")
    return f"not fused {where}while gradients are on: use torch.inference_mode(){generates}"


def _decoding(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, except those that repeat the reason in the first line."""
    first, *others = lines
    yield first
    reason = first.partition(": ")[2]
    for line in others:
        if not (reason and line.endswith(f": {reason}")):
            yield line


def _kernels(kernels: tuple[Kernel, ...]) -> Iterator[str]:
    """Yield the operations by tier, and the reasons why no faster tier serves them, each reason once."""
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for kernel in kernels:
        for name, reason in kernel.refused:
            refused.setdefault((name.partition("/")[0], reason), {})[kernel.operation] = None
    yield f"kernels: {by_tier(kernels)}"
    everything = len({kernel.operation for kernel in kernels})
    for (tier, reason), operations in list(refused.items())[:_REASONS]:
        where = "" if len(operations) == everything else f" ({', '.join(operations)})"
        yield f"  not {tier}{where}: {reason}"
    if len(refused) > _REASONS:
        yield f"  and {len(refused) - _REASONS} more reasons, in the details"


def _next(explanation: Explanation) -> Iterator[str]:
    if explanation.without_overlay:
        yield f"next: {WITHOUT_OVERLAY}"
    elif explanation.state == NO_ROCM:
        yield "next: hf-rocm doctor lists what ROCm needs; force=True (--force) shows hf_rocm's path on this machine"
    yield "details: .details() in Python, hf-rocm explain --all in a shell"


def _part(part: Part) -> Iterator[str]:
    delivery = {"in memory": "bound in memory", "installed": "installed in transformers"}[part.delivery]
    yield f"  {part.cls} × {part.instances}  overlay of {part.model}, {delivery}"
    if part.active < part.instances:
        yield f"    {part.instances - part.active} stay stock: not prepared, or restored"
    if part.group and part.active:
        yield f"    fused {part.fused} of {part.active}: {' + '.join(part.group)}"
        if part.gradients:
            yield "    one by one while gradients are on: call the model under torch.inference_mode()"
        yield from (f"    not fused × {count}: {reason}" for reason, count in part.not_fused.items())
    if part.joined:
        yield f"    one matrix in the checkpoint already: {', '.join(part.joined)}"
    if part.stock_because is not None and part.active:
        yield f"    stock × {part.active}: {part.stock_because}"
    yield from (f"    stock at the last call × {count}: {reason}" for reason, count in part.stayed_stock.items())
    if part.theirs:
        yield f"    another forward × {part.theirs}: it was set on the instance (by a Hub kernel or by you) and runs"


def _all_kernels(kernels: tuple[Kernel, ...]) -> Iterator[str]:
    """Yield every operation with its refusals. A reason that several operations share is listed once, before them."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for kernel in kernels:
        for name, reason in kernel.refused:
            reasons.setdefault(reason, {}).setdefault(_label(kernel), []).append(name)
    shared = {reason: labels for reason, labels in reasons.items() if len(labels) > 1}
    for reason, labels in shared.items():
        yield f"  refused in several operations: {reason}"
        where: dict[str, list[str]] = {}
        for label, names in labels.items():
            where.setdefault(", ".join(names), []).append(label)
        yield from (f"    {', '.join(those)}: not {names}" for names, those in where.items())
    for kernel in kernels:
        yield f"  {_label(kernel)}: {kernel.tier}, {kernel.kernel}"
        for reason, labels in reasons.items():
            if reason not in shared and _label(kernel) in labels:
                yield f"    not {', '.join(labels[_label(kernel)])}: {reason}"


def _label(kernel: Kernel) -> str:
    return f"{kernel.operation} ({kernel.situation})"


def _wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        counted = line.lstrip().replace(" × ", "\xa0×\xa0")  # a count is kept on the line of its class
        for part in wrapped(counted, width, indent=indent):
            yield part.replace("\xa0", " ")
