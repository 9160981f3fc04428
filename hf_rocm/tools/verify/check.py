"""The result of one comparison: a check, the place where it failed, and the errors of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Fault:
    """The first place where the error of hf_rocm exceeds the bound.

    layer: its path, or empty if every layer by itself is within its bound and only the end result is not. operation: a
    point inside the layer. error, allowed: relative errors.
    """

    layer: str
    operation: str
    error: float
    allowed: float
    others: tuple[str, ...] = ()  # other layers that exceed their bounds on stock's input

    def __str__(self) -> str:
        size = "not finite" if self.error != self.error else f"off by {self.error:.2e}, allowed {self.allowed:.2e}"
        if not self.layer:
            return f"no layer alone is wrong, but the end result is ({size})"
        text = f"{self.layer}: {self.operation} is the first that differs ({size})"
        if self.others:
            more = ", ".join(self.others[:4]) + (f" and {len(self.others) - 4} more" if len(self.others) > 4 else "")
            text += f"; also wrong: {more}"
        return text


@dataclass(frozen=True)
class Check:
    """One comparison.

    error, allowed: the relative error of the worst position and its bound. numbers: other measurements by name. note:
    why the check was not run, or a remark. fault: the first place that failed, or None.
    """

    name: str
    title: str
    status: str
    error: float | None = None
    allowed: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    note: str = ""
    fault: Fault | None = None


@dataclass(frozen=True)
class LayerError:
    """Relative errors of one layer's output at the worst position, compared with the reference.

    travelled: end to end, with the errors of the layers before it; own: on stock's own input; each for hf_rocm and for
    stock in the same dtype. allowed: the bound for own.
    """

    layer: str
    travelled: float
    stock_travelled: float
    own: float
    stock_own: float
    allowed: float  # for own
