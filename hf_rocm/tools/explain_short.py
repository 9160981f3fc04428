"""The short form of `explain`: the classes, the reasons why some are not served or fused, and the kernels.

A text of more than 25 lines is shortened in steps (see `_Step`) until it has at most 25, if the steps suffice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum

from hf_rocm.layers.weight_group import NOT_PREPARED
from hf_rocm.overlay.scan import WITHOUT_OVERLAY
from hf_rocm.tools.decoding import by_tier
from hf_rocm.tools.explanation import HEAD, Facts, Kernel, Part, Stock
from hf_rocm.tools.wrapping import wrapped

NO_ROCM = "stock, because this PyTorch is not a ROCm build and force is not set"
NO_OVERLAY = "hf_rocm has no overlay for {}"

# The largest number of lines, if the steps suffice.
LINES = 25


class _Step(IntEnum):
    """How a long text is shortened. Every step also includes the steps before it."""

    FULL = 0
    # Stock classes on one line per reason.
    FEW_STOCK = 1
    # Stock classes counted by reason.
    COUNTED_STOCK = 2
    # Served classes with the same notes together.
    TOGETHER = 3
    # At most two lines each on generate, forwards and linear layers.
    TWO_LINES = 4
    # Served classes without the names of their layers.
    NO_LAYERS = 5
    TWO_REASONS = 6
    # No empty lines, and no reasons for stock classes.
    COMPACT = 7


# The largest number of reasons why tiers are refused.
_REASONS = 6
# The largest number of class names per reason.
_STOCK = 6

# matches lines on uncaptured steps and forwards; the groups are the name of a submodel, if any, and the reason
_UNCAPTURED = re.compile(r"(?:([\w.]+): )?(?:(?:steps|prompts|forwards) run )?uncaptured(?: × \d+)?: (.*)")


def short(explanation: Facts, width: int) -> str:
    """Return the short form, shortened in steps until it has at most 25 lines or there are no more steps.

    width: the number of columns at which lines are wrapped.
    """
    for step in _Step:
        lines = list(_wrapped(_lines(explanation, width, step), width))
        if len(lines) <= LINES:
            break
    return "\n".join(lines)


def _lines(explanation: Facts, width: int, step: _Step) -> list[str]:
    """Return the lines before they are wrapped."""
    lines = headline(explanation)
    if explanation.parts or explanation.stock:
        lines += ["", *_served(explanation.parts, step), *_stock(explanation.stock, width, step)]
    lines += _notes(explanation, width, step)
    lines += [""] if explanation.decoding or explanation.forwards or explanation.kernels else []
    if explanation.decoding:
        lines.append(_limited("generate: ", _distinct(explanation.decoding), width, step))
    if explanation.forwards:
        lines.append(_limited("forwards: ", _distinct(explanation.forwards), width, step))
    if explanation.kernels:
        lines += _kernels(explanation.kernels, _REASONS if step < _Step.TWO_REASONS else 2)
    if explanation.tuning is not None:
        lines.append(f"tuned GEMMs: {explanation.tuning.sentence}")
    lines += ["", *_next(explanation)]
    return lines if step < _Step.COMPACT else [line for line in lines if line]


def headline(explanation: Facts) -> list[str]:
    facts = ", ".join(f"{key} {value}" for key, value in explanation.machine.items())
    return [f"{explanation.model}: {explanation.state}", f"  {facts}"]


def _served(parts: tuple[Part, ...], step: _Step) -> Iterator[str]:
    """Yield the served classes.

    Depending on the step, there is one line per class, one line for all classes with the same notes, or only one line.
    """
    rows = [(part.cls, f"{part.active} of {part.instances}", ", ".join(_part_notes(part))) for part in parts]
    if step < _Step.TOGETHER:
        first = max((len(name) for name, _, _ in rows), default=0)
        second = max((len(count) for _, count, _ in rows), default=0)
        yield from (f"  {name:<{first}}  {count:<{second}}  {notes}".rstrip() for name, count, notes in rows)
        return
    alike: dict[str, list[str]] = {}
    for name, count, notes in rows:
        alike.setdefault(notes if step < _Step.NO_LAYERS else notes.partition(":")[0], []).append(f"{name} {count}")
    lines = []
    for notes, names in alike.items():
        # A count is kept on the line of its class.
        listed = ", ".join(name.replace(" ", "\xa0") for name in names)
        lines.append(f"{listed} ({notes})" if notes else listed)
    yield from (f"  {line}" for line in (lines if step < _Step.NO_LAYERS else ["; ".join(lines)]))


def _stock(stock: tuple[Stock, ...], width: int, step: _Step) -> Iterator[str]:
    """Yield the stock classes by reason."""
    reasons: dict[str, list[Stock]] = {}
    for entry in stock:
        reasons.setdefault(entry.reason, []).append(entry)
    if step >= _Step.COMPACT and reasons:
        yield f"  stock: {sum(entry.instances for entry in stock)} modules, listed in the details"
        return
    if step >= _Step.COUNTED_STOCK and reasons:
        counts = {reason: sum(entry.instances for entry in classes) for reason, classes in reasons.items()}
        yield f"  stock: {'; '.join(f'{reason} × {count}' for reason, count in counts.items())}"
        return
    for reason, classes in reasons.items():
        lines = [f"  stock, {reason}: {_counted(classes, count)}" for count in range(_STOCK, 0, -1)]
        fitting = [line for line in lines if len(line) <= width] if step >= _Step.FEW_STOCK else lines
        yield fitting[0] if fitting else f"  stock, {reason}: {len(classes)} class{'es' * (len(classes) > 1)}"


def _counted(classes: list[Stock], most: int) -> str:
    named = [f"{entry.cls} × {entry.instances}" for entry in classes[:most]]
    rest = len(classes) - len(named)
    return ", ".join([*named, f"and {rest} more class{'es' * (rest > 1)}"] if rest > 0 else named)


def _part_notes(part: Part) -> Iterator[str]:
    if part.group and part.active:
        count = "" if part.fused == part.active else f" in {part.fused}"
        yield f"{'fused' if part.fused else 'not fused'}{count if part.fused else ''}: {' + '.join(part.group)}"
    if part.joined:
        yield f"one matrix in the checkpoint: {' and '.join(part.joined)}"


def _notes(explanation: Facts, width: int, step: _Step) -> Iterator[str]:
    """Yield the reasons why classes are not served or not fused, each reason once with its classes, and other notes.

    The other notes are on linear layers, quantisation, replaced functions and models without an overlay.
    """
    reasons: dict[str, list[str]] = {}
    one_by_one = [part.cls for part in explanation.parts if part.gradients]
    if one_by_one:
        every = one_by_one == [part.cls for part in explanation.parts if part.fused]
        reasons[_gradients(explanation)] = ["the fused classes"] if every else one_by_one
    for part in explanation.parts:
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
    linears = tuple(line for line in explanation.linears if line != HEAD)
    if step < _Step.TWO_LINES:
        lines += [f"linear layers: {line}" for line in linears]
    elif linears:
        lines.append(_limited("linear layers: ", linears, width, step))
    if explanation.quantized is not None:
        lines.append(f"quantised: {explanation.quantized}")
    if explanation.replaced:
        lines.append(f"replaced later by other code: {', '.join(explanation.replaced)}")
    listed = {entry.reason for entry in explanation.stock}
    lines += [
        f"{name}: {reason}"
        for name, reason in explanation.without_overlay.items()
        if NO_OVERLAY.format(name) not in listed
    ]
    if lines:
        yield from ["", *lines]


def _gradients(explanation: Facts) -> str:
    scope, note = ("in direct calls ", "; generate does this itself") if explanation.decoding else ("", "")
    return f"not fused {scope}while gradients are enabled: use torch.inference_mode(){note}"


def _distinct(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, except those that repeat the reason of an earlier line on uncaptured runs of the same model."""
    reasons: set[tuple[str | None, str]] = set()
    for line in lines:
        uncaptured = _UNCAPTURED.fullmatch(line)
        reason = (None, line.partition(": ")[2]) if uncaptured is None else (uncaptured[1], uncaptured[2])
        if reason not in reasons:
            yield line
        if uncaptured is not None:
            reasons.add(reason)


def _limited(start: str, parts: Iterable[str], width: int, step: _Step) -> str:
    """Return the joined parts. If the step requires it, only those that fit in two lines, and the number of others."""
    every = list(parts)
    for count in range(len(every), 0, -1):
        rest = len(every) - count
        text = start + "; ".join([*every[:count], *([f"{rest} more in the details"] if rest else [])])
        if step < _Step.TWO_LINES or len(wrapped(text, width)) <= 2:
            break
    return text


def _kernels(kernels: tuple[Kernel, ...], most: int) -> Iterator[str]:
    """Yield the operations by tier, and the reasons why no faster tier serves them, each reason once.

    The refusals of a tier that serves the operation with another implementation are only in the details. most: the
    largest number of reasons.
    """
    tiers: dict[str, set[str]] = {}
    for kernel in kernels:
        tiers.setdefault(kernel.operation, set()).add(kernel.tier)
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for kernel in kernels:
        for name, reason in kernel.refused:
            tier = name.partition("/")[0]
            if tier != kernel.tier:
                situation = f" for {kernel.situation}" if tier in tiers[kernel.operation] else ""
                refused.setdefault((tier, reason), {})[f"{kernel.operation}{situation}"] = None
    yield f"kernels: {by_tier(kernels)}"
    everything = {kernel.operation for kernel in kernels}
    for (tier, reason), operations in list(refused.items())[:most]:
        scope = "" if everything == operations.keys() else f" ({', '.join(operations)})"
        yield f"  not {tier}{scope}: {reason}"
    if len(refused) > most:
        yield f"  and {len(refused) - most} more reason{'s' * (len(refused) > most + 1)}, in the details"


def _next(explanation: Facts) -> Iterator[str]:
    if explanation.without_overlay:
        yield f"next: {WITHOUT_OVERLAY}"
    elif explanation.state == NO_ROCM:
        yield "next: hf-rocm doctor lists what ROCm needs; force=True (--force) shows hf_rocm's path on this machine"
    elif not explanation.prepared and any(NOT_PREPARED in part.not_fused for part in explanation.parts):
        yield (
            "next: hf_rocm.prepare(model) fuses its layers and records its steps or forwards; HF_ROCM_AUTO=1 does so "
            "when transformers loads a model"
        )
    yield "details: .details() in Python, hf-rocm explain --all in a shell"


def _wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        # A count is kept on the line of its class.
        counted = line.lstrip().replace(" × ", "\xa0×\xa0")
        for part in wrapped(counted, width, indent=indent):
            yield part.replace("\xa0", " ")
