"""The result of `explain`, and its text: a short form by default, the details, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hf_rocm.tools.explain_short import headline, short
from hf_rocm.tools.explanation import Facts, Kernel, Part
from hf_rocm.tools.wrapping import width

# Between implementations and between operations, because their names may contain commas.
_SEPARATOR = "; "


class Explanation(Facts):
    """The result of `explain`.

    `str()` returns the short text, `details()` the long one, and `to_dict()` a dict of builtins.
    """

    def __str__(self) -> str:
        """Return the short form, wrapped to the width of the terminal."""
        return short(self, width())

    __repr__ = __str__

    def details(self) -> str:
        """Return the long text, one fact per line, without wrapping."""
        return details(self)

    def _repr_html_(self) -> str:
        return html(self)


def details(explanation: Facts) -> str:
    """Return the long text, one fact per line, without wrapping."""
    lines = headline(explanation)
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


def html(explanation: Facts) -> str:
    """Return the short form as HTML, with the details in a collapsed section."""
    summary = f"<pre>{escape(short(explanation, 100))}</pre>"
    return f"{summary}<details><summary>details</summary><pre>{escape(details(explanation))}</pre></details>"


def _part(part: Part) -> Iterator[str]:
    delivery = {"in memory": "bound in memory", "installed": "installed in transformers"}[part.delivery]
    yield f"  {part.cls} × {part.instances}  overlay of {part.model}, {delivery}"
    inactive = part.instances - part.active
    if inactive:
        yield f"    {inactive} {'stays' if inactive == 1 else 'stay'} stock: not prepared, or restored"
    if part.group and part.active:
        yield f"    fused {part.fused} of {part.active}: {' + '.join(part.group)}"
        if part.gradients:
            yield "    not fused while gradients are enabled: call the model under torch.inference_mode()"
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
    # calls whose specifications differ only in fields that are not listed are one row
    rows = tuple(dict.fromkeys(kernels))
    reasons: dict[str, dict[str, dict[str, None]]] = {}
    for kernel in rows:
        for name, reason in kernel.refused:
            reasons.setdefault(reason, {}).setdefault(_label(kernel), {})[name] = None
    shared = {reason: labels for reason, labels in reasons.items() if len(labels) > 1}
    for reason, labels in shared.items():
        yield f"  refused in several operations: {reason}"
        groups: dict[str, list[str]] = {}
        for label, names in labels.items():
            groups.setdefault(_SEPARATOR.join(names), []).append(label)
        yield from (f"    {_SEPARATOR.join(group)}: not {names}" for names, group in groups.items())
    for kernel in rows:
        yield f"  {_label(kernel)}: {kernel.tier}, {kernel.kernel}"
        for reason, labels in reasons.items():
            if reason not in shared and _label(kernel) in labels:
                yield f"    not {_SEPARATOR.join(labels[_label(kernel)])}: {reason}"


def _label(kernel: Kernel) -> str:
    return f"{kernel.operation} ({kernel.situation})"
