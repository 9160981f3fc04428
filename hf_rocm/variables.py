"""Environment variables that look like options but are not, such as HF_ROCM_FROCE."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_PREFIX = "HF_ROCM_"
# Prefixes of variables that other programs also use.
_SHARED = ("USE_",)
_warned: set[str] = set()

_log = logging.getLogger("hf_rocm")


def unknown(names: Iterable[str], known: Iterable[str]) -> dict[str, str | None]:
    """Map unknown names to the most similar known name, or to None.

    A name that is not in `known` is unknown if it begins with HF_ROCM_, or if it begins with USE_ and is very similar
    to the name of an option. Other programs also have variables that begin with USE_.
    """
    options = set(known)
    candidates = sorted(name for name in set(names) - options if name.startswith((_PREFIX, *_SHARED)))
    if not candidates:
        return {}
    # Imported here to keep check_version cheap.
    from difflib import get_close_matches

    matches: dict[str, str | None] = {}
    for name in candidates:
        prefix = next(prefix for prefix in (_PREFIX, *_SHARED) if name.startswith(prefix))
        own = [option.removeprefix(prefix) for option in options if option.startswith(prefix)]
        near = get_close_matches(name.removeprefix(prefix), own, 1, 0.6 if prefix == _PREFIX else 0.9)
        if near or prefix == _PREFIX:
            matches[name] = prefix + near[0] if near else None
    return matches


def warn_of_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Log a warning for every unknown name, once per process."""
    for name, near in unknown(names, known).items():
        if name not in _warned:
            _warned.add(name)
            _log.warning("%s is not an option of hf_rocm%s", name, f"; did you mean {near}?" if near else "")
