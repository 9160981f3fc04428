"""Check that hf-rocm's own overlays are the ones from its wheel.

They are compared with the package manager's record of hf-rocm. If a file is not listed, differs or is missing, other
software changed the folder, and no overlay from it is used. A checkout has no such record and is not checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.block import sha256
from hf_rocm.overlay.locate import read_record, recorded_hex


def check_delivered(overlays: Path) -> None:
    """Raise `OverlayError` for the first file below `overlays` that is missing or added, or differs from the record."""
    site = overlays.parent.parent
    records = [file for file in site.glob("hf_rocm-*.dist-info/RECORD") if read_record(file)]
    if not records:
        return
    prefix = f"{overlays.relative_to(site).as_posix()}/"
    recorded: dict[str, str] = {}
    for file in records:
        recorded.update({path: value for path, value in read_record(file).items() if path.startswith(prefix)})
    if not recorded:
        # For an editable install, the record lists a link to the checkout.
        return
    for path, expected in sorted(recorded.items()):
        _check(site / path, recorded_hex(expected))
    for extra in _files(overlays):
        if extra.relative_to(site).as_posix() not in recorded:
            raise _tampered(extra, "no such file", "a file that is not part of hf-rocm")


def _check(file: Path, expected: str) -> None:
    try:
        status = file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise _tampered(file, f"sha256 {expected}", "no file") from None
    if not stat.S_ISREG(status.st_mode):
        raise _tampered(file, f"sha256 {expected}", "a folder, a link, a pipe or a device")
    actual = sha256(file.read_bytes())
    if actual != expected:
        raise _tampered(file, f"sha256 {expected}", f"sha256 {actual}")


def _files(folder: Path) -> Iterator[Path]:
    """Yield every file and every link, except those in `__pycache__`."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        linked = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in [*linked, *sorted(names)])


def _tampered(file: Path, expected: str, actual: str) -> OverlayError:
    return OverlayError(
        "hf-rocm's own overlays are not what its package delivered, so none of them is used",
        facts={"file": file, "expected": expected, "found": actual},
        hint="reinstall hf-rocm: pip install --force-reinstall --no-deps hf-rocm",
    )
