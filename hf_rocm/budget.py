"""Memory budgets, in bytes or as a share of a total, and the size of memory that the host and the GPU share."""

from __future__ import annotations

import math
import re
from typing import Any

from hf_rocm.errors import OptionError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def in_bytes(budget: Any, weights: int, *, source: str = "budget=") -> int:
    """Return the budget in bytes.

    budget: an integer is a number of bytes, a float from 0 to 1 is a share of `weights`; a string may be either
    (`"4 GiB"`, `"512MB"`, `"25%"`). weights: the size of the model's weights, or another total, in bytes. source: the
    name of the setting in the error message. Raises `OptionError` for any other budget.
    """
    if isinstance(budget, str):
        return _of_text(budget.strip(), weights, source)
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    if isinstance(budget, float) and math.isfinite(budget) and 0 <= budget <= 1:
        return int(budget * weights)
    raise _refused(budget, source)


def of_one_pool(gpu: int, host: int, carved_out: int) -> int:
    """Return the size in bytes of the memory that a GPU shares with the host, or of its free part.

    gpu: the total or free size that the driver reports. The total is the part that the firmware reserved for the GPU,
    the host pages that the GPU may map, or both. host: the size of the memory that Linux manages, or of the available
    part of that memory. carved_out: the size of the part that the firmware reserved.
    """
    return min(gpu, host + carved_out)


def _of_text(text: str, weights: int, source: str) -> int:
    share = _SHARE.fullmatch(text)
    if share is not None and float(share[1]) <= 100:
        return int(float(share[1]) / 100 * weights)
    size = _TEXT.fullmatch(text)
    unit = None if size is None else _UNITS.get(size[2].upper())
    if size is None or unit is None or ("." in size[1] and unit == 1):
        raise _refused(text, source)
    amount = float(size[1]) * unit
    if not math.isfinite(amount):
        raise _refused(text, source)
    return int(amount)


def _refused(budget: object, source: str) -> OptionError:
    return OptionError(
        f"{source}{budget} is not valid",
        facts={"allowed": "bytes (an integer, or text such as 4GiB), or a share (0.0 to 1.0, or 25%)"},
    )
