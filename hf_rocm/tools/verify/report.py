"""The result of verify, as text, as an SVG chart, and as a dict of built-in types.

The text has one line per check, the failures, the wrong layers, and the verdict. The details also contain other
layers, the end results, and the kernels. At most 12 layers are listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hf_rocm.tools.drawing import svg
from hf_rocm.tools.verify.check import FAILED, NOT_RUN, Check, LayerError
from hf_rocm.tools.verify.picture import picture
from hf_rocm.tools.wrapping import width, wrapped

# The version of the JSON format.
VERSION = 1

# The maximum number of listed layers: those whose errors are closest to the bound or exceed it most.
_LAYERS = 12


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. `str()` is a short report, `details()` a full one.

    `to_dict()` returns only built-in types.
    """

    model: str
    machine: dict[str, str]
    checks: tuple[Check, ...]
    layers: tuple[LayerError, ...]
    # Operation → tiers and kernels that served it.
    tiers: dict[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all checks that were run passed."""
        return all(check.status != FAILED for check in self.checks)

    def check(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "passed": self.passed, **asdict(self)}

    def picture(self) -> str:
        """Return the chart of the error per layer as SVG."""
        return svg(picture(self.model, self.machine, self.layers, _verdict(self), passed=self.passed))

    def details(self) -> str:
        """Return all checks, end results and kernels, and at most 12 layers, wrapped to the width of the terminal."""
        return _text(self, width(), everything=True)

    def __str__(self) -> str:
        return _text(self, width())


def _text(result: Verification, width: int, *, everything: bool = False) -> str:
    """Return the report, wrapped at `width` columns. everything: add the layers, the end results and the kernels."""
    machine = result.machine
    lines = wrapped(
        f"{result.model} in {machine['dtype']} on {machine['device']}, reference: {machine['reference']}", width
    )
    lines += wrapped(machine["versions"], width, indent="  ", hanging="")
    column = max(len("check"), *(len(check.name) for check in result.checks)) + 2
    lines += ["", f"{'check':<{column}}{'result':<9}{'error':>9}{'allowed':>9}"]
    for check in result.checks:
        lines += _check_lines(check, width, column, everything=everything)
    wrong = tuple(layer for layer in result.layers if not layer.own <= layer.allowed)
    lines += _layer_lines(result.layers if everything else wrong, len(result.layers))
    if everything:
        lines += _final_lines(result, width)
        lines += ["", "what ran"] if result.tiers else []
        for operation, kernels in result.tiers.items():
            lines += wrapped(kernels, width, indent=f"  {operation:<18}", hanging="")
    lines += ["", *wrapped(f"{result.model}: {_verdict(result)}", width)]
    lines += wrapped(f"next: {_next(result, everything=everything)}", width)
    return "\n".join(lines)


def _verdict(result: Verification) -> str:
    failed = [check.name for check in result.checks if check.status == FAILED]
    skipped = sum(check.status == NOT_RUN for check in result.checks)
    ran = len(result.checks) - skipped
    words = f"{len(failed)} of {ran} checks failed ({', '.join(failed)})" if failed else f"all {ran} checks passed"
    return f"{words}, {skipped} not run, {result.seconds:.0f} s"


def _next(result: Verification, *, everything: bool) -> str:
    if result.passed:
        return "hf-rocm bench MODEL" + ("" if everything else "; hf-rocm verify --all also shows the layers' errors")
    return (
        "HF_ROCM_TIER=torch hf-rocm verify MODEL shows whether a kernel is wrong; "
        "add the output of `hf-rocm env` to a report"
    )


def _check_lines(check: Check, width: int, column: int, *, everything: bool) -> Iterator[str]:
    head = f"{check.name:<{column}}{check.status:<9}"
    if check.status == NOT_RUN and not everything:
        yield from wrapped(check.note or check.title, width, indent=head, hanging="")
        return
    yield f"{head}{_number(check.error):>9}{_number(check.allowed):>9}"
    if check.status == FAILED or everything:
        for part in (check.title, check.fault, check.note):
            if part:
                yield from wrapped(str(part), width, indent="    ", hanging="")


def _final_lines(result: Verification, width: int) -> Iterator[str]:
    """Yield lines that compare the end results with the reference and, at the porting guides' tolerance, with stock."""
    rows = [check for check in result.checks if "kl" in check.numbers]
    if not rows:
        return
    yield ""
    yield from wrapped("end results: differences from the reference (and those of stock)", width)
    for check in rows:
        n = check.numbers
        pairs = {
            name: (_number(n[key]), _number(n[f"stock_{key}"]))
            for name, key in (("max", "max"), ("mean", "mean"), ("KL", "kl"))
        }
        pairs["same top-1"] = (f"{n['same_top1']:.2%}", f"{n['stock_same_top1']:.2%}")
        words = [f"{name} {actual} ({stock})" for name, (actual, stock) in pairs.items()]
        words.append(f"within rtol = atol = 5e-2 of stock {n['within_5e-2']:.2%}")
        yield from wrapped(", ".join(words), width, indent=f"  {check.name:<18}", hanging="")


def _layer_lines(layers: Iterable[LayerError], count: int) -> Iterator[str]:
    shown = known = tuple(layers)
    if not known:
        return
    if len(known) > _LAYERS:
        worst = sorted(known, key=lambda layer: _share(layer.own, layer.allowed), reverse=True)[:_LAYERS]
        shown = tuple(layer for layer in known if layer in worst)
    column = max(len("layer"), *(len(layer.layer) for layer in shown))
    yield ""
    yield f"{'layer':<{column}}{'by itself':>11}{'(stock)':>9}{'allowed':>9}{'end to end':>12}{'(stock)':>9}"
    for layer in shown:
        mark = "  <- off" if not layer.own <= layer.allowed else ""
        yield (
            f"{layer.layer:<{column}}{_number(layer.own):>11}{_number(layer.stock_own):>9}{_number(layer.allowed):>9}"
            f"{_number(layer.travelled):>12}{_number(layer.stock_travelled):>9}{mark}"
        )
    if len(shown) < count:
        yield f"({len(shown)} of {count} layers, those closest to the allowed error or above it)"


def _share(error: float, allowed: float) -> float:
    return math.inf if math.isnan(error) else error / allowed if allowed else error


def _number(value: float | None) -> str:
    return "-" if value is None else "nan" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
