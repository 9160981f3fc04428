"""The account in words: a line for each check, the layers, and what to do next."""

from __future__ import annotations

import math
import textwrap

from hf_rocm.diagnostics.verify.report import FAILED, NOT_RUN, Check, Verification

_WIDTH = 118
_LAYERS = 12  # lines of layers: the worst ones


def text(found: Verification) -> str:
    lines = [f"{found.model}: {_verdict(found)}"]
    lines += [f"  {name:<12}{value}" for name, value in found.machine.items()]
    lines += ["", f"{'check':<18}{'result':<9}{'error':>9}{'allowed':>9}  what, and what was found"]
    for check in found.checks:
        lines += _check_lines(check)
    lines += _final_lines(found)
    lines += _layer_lines(found)
    if found.tiers:
        lines += ["", "what ran"]
        lines += [f"  {operation:<18}{where}" for operation, where in found.tiers.items()]
    return "\n".join(lines)


def _verdict(found: Verification) -> str:
    failed = [check.name for check in found.checks if check.status == FAILED]
    skipped = sum(check.status == NOT_RUN for check in found.checks)
    ran = len(found.checks) - skipped
    words = f"{len(failed)} of {ran} checks failed ({', '.join(failed)})" if failed else f"all {ran} checks passed"
    return f"{words}, {skipped} not run, {found.seconds:.0f} s"


def _check_lines(check: Check) -> list[str]:
    head = f"{check.name:<18}{check.status:<9}{_number(check.error):>9}{_number(check.allowed):>9}  "
    parts = [check.title]
    if check.fault is not None:
        parts.append(str(check.fault))
    if check.note:
        parts.append(check.note)
    first, *rest = parts
    lines = [head + first]
    for part in rest:
        lines += textwrap.wrap(part, _WIDTH, initial_indent=" " * 47, subsequent_indent=" " * 47,
                               break_long_words=False)  # fmt: skip
    return lines


def _final_lines(found: Verification) -> list[str]:
    """What the end results look like beside the reference, and beside the guides' fixed tolerance."""
    rows = [check for check in found.checks if "kl" in check.numbers]
    if not rows:
        return []
    header = ("end results", "max", "(stock)", "mean", "(stock)", "KL", "(stock)", "same top-1", "(stock)", "in 5e-2")
    cells: list[tuple[str, ...]] = [header]
    for check in rows:
        n = check.numbers
        values = [n["max"], n["stock_max"], n["mean"], n["stock_mean"], n["kl"], n["stock_kl"]]
        shares = [n["same_top1"], n["stock_same_top1"], n["within_5e-2"]]
        cells.append((check.name, *(_number(value) for value in values), *(f"{share:.2%}" for share in shares)))
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["", *("  ".join([row[0].ljust(widths[0]),
                              *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
                   for row in cells)]  # fmt: skip
    words = (
        "differences are to the reference; in 5e-2: elements within rtol = atol = 5e-2 of stock's, as guides have it"
    )
    return [*lines, f"({words})"]


def _layer_lines(found: Verification) -> list[str]:
    if not found.layers:
        return []
    lines = ["", f"{'layer':<34}{'by itself':>10}{'(stock)':>10}{'allowed':>10}{'end to end':>12}{'(stock)':>10}"]
    shown = found.layers
    if len(shown) > _LAYERS:
        worst = sorted(shown, key=lambda each: _share(each.own, each.allowed), reverse=True)[:_LAYERS]
        shown = tuple(each for each in found.layers if each in worst)
    for each in shown:
        mark = "  <- off" if not each.own <= each.allowed else ""
        numbers = (each.own, each.stock_own, each.allowed)
        lines.append(f"{each.layer:<34}" + "".join(f"{_number(value):>10}" for value in numbers)
                     + f"{_number(each.travelled):>12}{_number(each.stock_travelled):>10}{mark}")  # fmt: skip
    if len(shown) < len(found.layers):
        lines.append(f"(the {len(shown)} of {len(found.layers)} layers that come nearest to what is allowed)")
    return lines


def _share(error: float, allowed: float) -> float:
    return math.inf if math.isnan(error) else error / allowed if allowed else error


def _number(value: float | None) -> str:
    return "-" if value is None else "nan" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
