"""Every compiled form that Python might run in place of a source file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from hf_rocm.overlay.disk import Disk


def compiled_forms(source: Path, disk: Disk) -> list[Path]:
    """The `.pyc` files of one source file that exist: all interpreters, all optimisation levels, legacy places.

    Timestamps would not do: a pyc with an unchecked hash is run whatever its source says, and one whose source has
    the same size and second is taken for fresh.
    """
    # under PYTHONPYCACHEPREFIX the folder lies elsewhere, and another process may run without it
    folders = {source.parent / "__pycache__", Path(importlib.util.cache_from_source(str(source))).parent}
    cached = re.compile(re.escape(source.stem) + r"\.[^.]+(\.opt-[^.]+)?\.pyc")
    found = [folder / name for folder in sorted(folders) for name in disk.list(folder) if cached.fullmatch(name)]
    legacy = (f"{source.stem}.pyc", f"{source.stem}.pyo")
    return found + [source.parent / name for name in disk.list(source.parent) if name in legacy]
