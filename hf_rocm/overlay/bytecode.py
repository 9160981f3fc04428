"""Find every compiled file that Python might run instead of a source file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from hf_rocm.overlay.disk import Disk


def compiled_forms(source: Path, disk: Disk) -> list[Path]:
    """Return a source's existing compiled files for all interpreters and optimisation levels, including legacy files.

    Comparing timestamps would not be sufficient: Python runs a pyc with an unchecked hash regardless of its source, and
    considers a pyc up to date if its source has the same size and mtime in seconds.
    """
    # PYTHONPYCACHEPREFIX moves the folder, and another process may run without it
    folders = {source.parent / "__pycache__", Path(importlib.util.cache_from_source(str(source))).parent}
    cached = re.compile(re.escape(source.stem) + r"\.[^.]+(\.opt-[^.]+)?\.pyc")
    current = [folder / name for folder in sorted(folders) for name in disk.list(folder) if cached.fullmatch(name)]
    legacy = (f"{source.stem}.pyc", f"{source.stem}.pyo")
    return current + [source.parent / name for name in disk.list(source.parent) if name in legacy]
