"""Environment variables that look like an option but are not one, such as HF_ROCM_FROCE."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_PREFIX = "HF_ROCM_"
_warned: set[str] = set()

_log = logging.getLogger("hf_rocm")


def unknown(names: Iterable[str], known: Iterable[str]) -> dict[str, str | None]:
    """Map unknown names that begin with HF_ROCM_ to the most similar known name, or to None."""
    own = [name.removeprefix(_PREFIX) for name in known if name.startswith(_PREFIX)]
    given = {name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)}
    strange = sorted(given - set(own))
    if not strange:
        return {}
    from difflib import get_close_matches  # imported here to keep check_version cheap

    near = {name: get_close_matches(name, own, 1) for name in strange}
    return {_PREFIX + name: _PREFIX + names[0] if names else None for name, names in near.items()}


def warn_of_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Log a warning for every unknown name, once per process."""
    for name, near in unknown(names, known).items():
        if name not in _warned:
            _warned.add(name)
            _log.warning("%s is not an option of hf_rocm%s", name, f"; did you mean {near}?" if near else "")
