"""Locate transformers without importing it, and check whether it may be patched.

Any installation may be read. `check_writable` refuses to patch a checkout or a symbolic link. Unless the user gave its
path, the package must also be the only transformers on `sys.path`. In a virtual environment, it must then be in that
environment, or in the user's site-packages if they are enabled.
"""

from __future__ import annotations

import base64
import csv
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hf_rocm.errors import OverlayError

_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_PACKAGE_DIRECTORIES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Installation:
    """One transformers package on disk. named: the user gave its path."""

    root: Path
    version: str
    metadata: Path | None
    named: bool = False

    def file(self, module: str) -> Path:
        """The file of `transformers.x.y`: the package's `__init__.py` if there is one, else the module."""
        stem = self.root.joinpath(*module.split(".")[1:])
        package = stem / "__init__.py"
        return package if package.is_file() else stem.with_name(f"{stem.name}.py")

    def recorded_sha256(self, file: Path) -> str | None:
        """The hash of this file in the package manager's RECORD, or None."""
        recorded = self.record.get(file.relative_to(self.root.parent).as_posix())
        return recorded_hex(recorded) if recorded else None

    @cached_property
    def record(self) -> dict[str, str]:
        """The hashes in RECORD, as encoded there, by path relative to the folder that contains the package."""
        return read_record(self.metadata / "RECORD") if self.metadata else {}


def locate(path: Path | str | None = None) -> Installation:
    """Return the transformers that `import transformers` would import, or the one at `path`.

    path: the package's directory, or the directory that contains it. Raises `OverlayError` if the package or
    its version can't be determined.
    """
    root = _find() if path is None else _named(Path(path))
    metadata = _metadata(root)
    version = _version(root, metadata)
    return Installation(root, version, metadata, named=path is not None)


def read_record(file: Path) -> dict[str, str]:
    """The sha256 entries of a package manager's RECORD, as encoded there; empty if there is no such file."""
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines) if len(row) == 3 and row[1].startswith("sha256=")]
    return {path: value.removeprefix("sha256=") for path, value, _ in rows}


def recorded_hex(encoded: str) -> str:
    """Convert a hash from RECORD (urlsafe base64 without padding) to hexadecimal."""
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()


def check_writable(installation: Installation) -> None:
    """Raise `OverlayError`, with a remedy as the hint, if this installation must not be patched."""
    root = installation.root
    facts = {"path": root}
    if (checkout := _checkout(installation)) is not None:
        raise OverlayError(
            "transformers is an editable or source checkout, which is never patched",
            facts={**facts, "found": checkout, "expected": "a copy that pip or uv installed"},
            hint="pip install transformers without -e, or patch in memory: hf_rocm.activate()",
        )
    if (link := _symlink(root)) is not None:
        raise OverlayError(
            "the transformers package is a symbolic link, so its files may be shared",
            facts={**facts, "found": f"{link} → {link.readlink()}", "expected": "an ordinary directory"},
            hint=f"install transformers here, or specify the target: --transformers-path {root.resolve()}",
        )
    if installation.named:
        return
    others = [other for other in _all_on_path() if not _same(other, root)]
    if others:
        raise OverlayError(
            "more than one transformers is on the path",
            facts={"found": root, **{f"and {n}": other for n, other in enumerate(others, 1)}, "expected": "one"},
            hint=f"uninstall all but one, or specify one: --transformers-path {root}",
        )
    if sys.prefix != sys.base_prefix and not _belongs_to(root, Path(sys.prefix)):
        raise OverlayError(
            "this transformers does not belong to the active environment",
            facts={**facts, "expected": f"a directory under {sys.prefix}"},
            hint=f"install transformers into this environment, or specify this one: --transformers-path {root}",
        )


def _find() -> Path:
    try:
        spec = importlib.util.find_spec("transformers")
    except ValueError:
        # sys.modules contains a module without a spec.
        spec = None
    if spec is None:
        raise OverlayError(
            "transformers is not installed in this environment",
            facts={"python": sys.executable, "expected": "transformers 4.53 or newer"},
            hint="pip install transformers, or specify one with --transformers-path",
        )
    if spec.origin is None:
        raise OverlayError(
            "transformers is not installed in this environment: only a leftover folder is there",
            facts={"found": ", ".join(spec.submodule_search_locations or ()), "expected": "transformers/__init__.py"},
            hint="remove that folder, then pip install transformers",
        )
    origin = Path(spec.origin)
    if not origin.is_file():
        raise OverlayError(
            "transformers is imported from an archive, which can't be patched",
            facts={"found": origin, "expected": "a directory"},
            hint="install transformers with pip or uv",
        )
    return origin.parent.absolute()


def _named(path: Path) -> Path:
    for candidate in (path, path / "transformers"):
        if (candidate / "__init__.py").is_file() and (candidate / "models").is_dir():
            return Path(os.path.abspath(candidate))  # noqa: PTH100 (Path.resolve would hide a symbolic link)
    raise OverlayError(
        "there is no transformers at this path",
        facts={"path": path, "expected": "the package's directory, or the one that contains it"},
        hint="python -c 'import importlib.util as u; print(u.find_spec(\"transformers\").origin)' prints the path of "
        "the installed one",
    )


def _metadata(root: Path) -> Path | None:
    records = sorted(root.parent.glob("transformers-*.dist-info"))
    if len(records) > 1:
        raise OverlayError(
            "the package manager left several records of transformers, so its version is unclear",
            facts={"found": " and ".join(path.name for path in records), "path": root.parent},
            hint="remove these folders, then reinstall transformers",
        )
    return records[0] if records else None


def _version(root: Path, metadata: Path | None) -> str:
    match = _VERSION.search((root / "__init__.py").read_text(encoding="utf-8", errors="replace"))
    recorded = metadata.name.removeprefix("transformers-").removesuffix(".dist-info") if metadata else None
    if match is None:
        raise OverlayError(
            "this transformers has no version",
            facts={"file": root / "__init__.py", "expected": '__version__ = "…"', "found": "no such line"},
            hint="reinstall transformers",
        )
    # A local build may tag only one of the two versions, as in 5.4.0 and 5.4.0+rocm1.
    if recorded is not None and recorded.split("+")[0] != match[1].split("+")[0]:
        raise OverlayError(
            "the files and the package record of transformers are from different releases",
            facts={"file": root / "__init__.py", "expected": f"{recorded} ({metadata})", "found": match[1]},
            hint="reinstall transformers",
        )
    return match[1]


def _checkout(installation: Installation) -> str | None:
    root = installation.root
    if any(part in _PACKAGE_DIRECTORIES for part in (root.parent.name, root.parent.parent.name)):
        metadata = installation.metadata
    else:
        for parent in (root, root.parent, root.parent.parent):
            if (parent / ".git").exists():
                return f"{parent / '.git'}"
        if root.parent.name == "src" and (root.parent.parent / "setup.py").is_file():
            return f"{root.parent.parent / 'setup.py'}"
        # the record of an editable install is in site-packages, and the package's files are elsewhere
        metadata = installation.metadata
        if metadata is None and not installation.named:
            metadata = next(_metadata_on_path(), None)
    return _editable(metadata) if metadata else None


def _editable(metadata: Path) -> str | None:
    file = metadata / "direct_url.json"
    try:
        origin = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return None
    editable = isinstance(origin, dict) and origin.get("dir_info", {}).get("editable", False)
    return f"{file} (editable: {origin.get('url', '')})" if editable else None


def _metadata_on_path() -> Iterator[Path]:
    for entry in sys.path:
        yield from sorted(Path(entry).glob("transformers-*.dist-info"))


def _symlink(root: Path) -> Path | None:
    return next((path for path in (root, root / "models") if stat.S_ISLNK(path.lstat().st_mode)), None)


def _all_on_path() -> Iterator[Path]:
    for entry in dict.fromkeys(sys.path):
        candidate = Path(entry) / "transformers"
        if (candidate / "__init__.py").is_file():
            yield candidate.absolute()


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _belongs_to(root: Path, prefix: Path) -> bool:
    import site

    homes = [prefix, Path(site.getusersitepackages())] if site.ENABLE_USER_SITE else [prefix]
    return any(root.resolve().is_relative_to(home.resolve()) for home in homes)
