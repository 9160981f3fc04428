"""Parsers of option values. Every function reads a variable from a mapping. An invalid value raises `OptionError`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hf_rocm.budget import in_bytes
from hf_rocm.errors import OptionError


def flag(environment: Mapping[str, str], name: str, *, default: bool, allowed: str = "0, 1, or unset") -> bool:
    text = environment.get(name, "").strip()
    if text in ("0", "1"):
        return text == "1"
    if text:
        raise OptionError(f"{name}={text} is not valid", facts={"allowed": allowed})
    return default


def seconds(environment: Mapping[str, str], name: str, *, default: float, largest: float = math.inf) -> float:
    text = environment.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value <= largest:
        allowed = "a positive number of seconds" + ("" if largest == math.inf else f", at most {largest:g}")
        raise OptionError(f"{name}={text} is not valid", facts={"allowed": allowed})
    return value


def memory(environment: Mapping[str, str], name: str, *, default: str) -> str:
    """Return an amount of memory as text: a number of bytes, with or without a unit, or a share of a total."""
    text = environment.get(name, "").strip() or default
    in_bytes(text, 0, source=f"{name}=")
    return text


def number(environment: Mapping[str, str], name: str, *, default: int, allowed: str, smallest: int = 0) -> int:
    """Return an integer. allowed: the allowed values, for the error message."""
    text = environment.get(name, "").strip()
    try:
        value = int(text) if text else default
    except ValueError:
        value = smallest - 1
    if value < smallest:
        raise OptionError(f"{name}={text} is not valid", facts={"allowed": allowed})
    return value
