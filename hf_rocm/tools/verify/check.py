"""The result of one comparison: the check, the place where it failed, and the errors of layers."""

from __future__ import annotations

from dataclasses import dataclass, field

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Fault:
    """The first place where the error of hf_rocm exceeds its bound.

    layer: the path of the layer, or another place such as `step 3` or `loss`. It is empty if every layer on its own is
    within its bound, and only the end result exceeds its bound. operation: a point inside the layer, or a description.
    error, allowed: relative errors; for logits and losses, absolute errors; for weights and saved files, the number of
    tensors that differ, and 0. others: other layers that exceed their bounds on stock's input.
    """

    layer: str
    operation: str
    error: float
    allowed: float
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = "not finite" if self.error != self.error else f"off by {self.error:.2e}, allowed {self.allowed:.2e}"
        if not self.layer:
            return f"no single layer is wrong, but the end result is ({size})"
        text = f"{self.layer}: {self.operation} is the first error above its bound ({size})"
        if self.others:
            more = ", ".join(self.others[:4]) + (f" and {len(self.others) - 4} more" if len(self.others) > 4 else "")
            text += f"; also wrong: {more}"
        return text


@dataclass(frozen=True)
class Check:
    """One comparison.

    error, allowed: the error and its bound; in most checks, the relative error at the worst position. numbers: other
    measurements by name. note: the reason why the check was not run, or a remark. fault: the first place that failed,
    or None.
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
    """The errors of one layer's output at the worst position, relative to the reference.

    travelled, stock_travelled: the errors end to end, including those of earlier layers, for hf_rocm and for stock in
    the same dtype. own, stock_own: the errors on stock's input. allowed: the bound for `own`.
    """

    layer: str
    travelled: float
    stock_travelled: float
    own: float
    stock_own: float
    allowed: float
