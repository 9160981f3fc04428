"""The result of verify, as text, as an SVG chart, and as builtins."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_rocm.tools.drawing import svg
from hf_rocm.tools.verify.check import FAILED, Check, LayerError
from hf_rocm.tools.verify.picture import picture
from hf_rocm.tools.verify.text import text
from hf_rocm.tools.wrapping import width

VERSION = 1  # the version of the JSON format


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: `str()` in short, `details()` in full, `to_dict()` for programs (builtins only)."""

    model: str
    machine: dict[str, str]
    checks: tuple[Check, ...]
    layers: tuple[LayerError, ...]
    tiers: dict[str, str]  # operation → tiers and kernels that served it
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
        return svg(picture(self))

    def details(self) -> str:
        """Return every check, layer and result, wrapped to the width of the terminal."""
        return text(self, width(), everything=True)

    def __str__(self) -> str:
        return text(self, width())
