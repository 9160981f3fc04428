"""How much memory shuffled copies may take: bytes, or a share of the model's weights."""

from __future__ import annotations

import math
import re
from typing import Any

from hf_rocm.errors import OptionError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def in_bytes(budget: Any, weights: int, *, source: str = "budget=") -> int:
    """The budget in bytes, for a model whose weights take `weights` bytes.

    budget: an integer is bytes, a float from 0 to 1 a share of the weights; text is either (`"4 GiB"`, `"512MB"`,
    `"25%"`). Raises `OptionError` on anything else.
    """
    if isinstance(budget, str):
        return _of_text(budget.strip(), weights, source)
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    if isinstance(budget, float) and math.isfinite(budget) and 0 <= budget <= 1:
        return int(budget * weights)
    raise _refused(budget, source)


def _of_text(text: str, weights: int, source: str) -> int:
    share = _SHARE.fullmatch(text)
    if share is not None and float(share[1]) <= 100:
        return int(float(share[1]) / 100 * weights)
    size = _TEXT.fullmatch(text)
    unit = None if size is None else _UNITS.get(size[2].upper())
    if size is None or unit is None or ("." in size[1] and unit == 1):
        raise _refused(text, source)
    return int(float(size[1]) * unit)


def _refused(budget: object, source: str) -> OptionError:
    return OptionError(
        f"{source}{budget} is not understood",
        facts={"allowed": "bytes (an integer, or text such as 4GiB), or a share of the weights (0.0 to 1.0, or 25%)"},
    )
