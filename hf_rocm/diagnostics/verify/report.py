"""What verify found: an object with text for people and builtins for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
VERSION = 1  # of the JSON


@dataclass(frozen=True)
class Fault:
    """The first place where hf_rocm is further off than allowed. layer: a path; operation: a point inside it.

    Without a layer, each by itself is within its bound and only the end result isn't.
    """

    layer: str
    operation: str
    error: float
    allowed: float
    others: tuple[str, ...] = ()  # further layers, each wrong on stock's own input

    def __str__(self) -> str:
        size = "not finite" if self.error != self.error else f"off by {self.error:.2e}, allowed {self.allowed:.2e}"
        if not self.layer:
            return f"no layer by itself is wrong, but together they are ({size})"
        text = f"{self.layer}: {self.operation} is the first that differs ({size})"
        if self.others:
            more = ", ".join(self.others[:4]) + (f" and {len(self.others) - 4} more" if len(self.others) > 4 else "")
            text += f"; by itself wrong, too: {more}"
        return text


@dataclass(frozen=True)
class Check:
    """One thing that was compared. error, allowed: the worst position's relative error; numbers: whatever else was
    measured, by name. note: why it was not run, or what a reader should know.
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
    """Relative errors of one layer's output, of the worst position. travelled: with what the layers before it left;
    own: on stock's own input; each of hf_rocm and of stock in the same dtype, beside the reference.
    """

    layer: str
    travelled: float
    stock_travelled: float
    own: float
    stock_own: float
    allowed: float  # for own


@dataclass(frozen=True)
class Verification:
    """The whole account: `str()` for people, `to_dict()` for programs (builtins only)."""

    model: str
    machine: dict[str, str]
    checks: tuple[Check, ...]
    layers: tuple[LayerError, ...]
    tiers: dict[str, str]  # operation → tiers and kernels that served it
    seconds: float

    @property
    def passed(self) -> bool:
        """Nothing failed; what was not run says so."""
        return all(check.status != FAILED for check in self.checks)

    def check(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "passed": self.passed, **asdict(self)}

    def picture(self) -> str:
        """The error by layer, as SVG."""
        from hf_rocm.diagnostics.verify.picture import picture

        return picture(self)

    def __str__(self) -> str:
        from hf_rocm.diagnostics.verify.text import text

        return text(self)
