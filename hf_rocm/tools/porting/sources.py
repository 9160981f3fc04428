"""Select the files of a folder to check, and a reader for each.

Files and folders that are left out are listed with the reason, and files without rules are counted.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_rocm.tools.porting import notebook
from hf_rocm.tools.porting.findings import Place
from hf_rocm.tools.porting.module import Module
from hf_rocm.tools.porting.rules import PYTHON, building, commands, containers, native, packaging, requirements

# The size limit in bytes; larger files are usually generated.
LARGEST = 2 * 1024 * 1024
# The limit for notebooks, which may contain images.
LARGEST_NOTEBOOK = 16 * 1024 * 1024
# The end of a reason, after the name of the counterpart.
COUNTERPART = "is its counterpart for ROCm"

# A first line that names a shell such as `sh` as the interpreter, for files without a suffix.
_SHELL = re.compile(rb"#!\s*\S*(?:/|env\s+)(?:ba|da|z)?sh\b")
_FOREIGN = {".git", ".hg", ".svn", "__pycache__", "node_modules", "site-packages", ".venv", "venv", ".tox", ".eggs"}
_OWN = re.compile(
    r"cuda|nvidia|gpu|cu1\d\d?|docker|requirements|environment|install|setup|build|compose", re.IGNORECASE
)
_ROCM = re.compile(r"(?:^|[-_.])(?:rocm|amd|hip)(?![a-z])", re.IGNORECASE)
_VENDOR = re.compile(r"[-_.]?(?:rocm|amdgpu|amd|hip|cuda|nvidia|gpu|cu1\d\d?)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Reader:
    """How to read a kind of file. kind: the name of the kind in a report. places: a function that returns the findings
    in a text. largest: the size limit in bytes. unread_parts: a function that describes the parts of a text that can't
    be read, or returns ''.
    """

    kind: str
    places: Callable[[str], Iterator[Place]]
    largest: int = LARGEST
    unread_parts: Callable[[str], str] | None = None


@dataclass
class Sources:
    """The selected files. files: the files to read, with their readers. left_out: path → the reason why it is not read;
    the path of a folder ends with a slash. suffixes: suffix, or the name of a file without a suffix → the number of
    such files, for which there are no rules.
    """

    files: dict[Path, Reader] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    suffixes: dict[str, int] = field(default_factory=dict)


def collect(top: Path) -> Sources:
    """Select the files in a folder, or a single file."""
    sources = Sources()
    if top.is_file():
        if (reader := reader_of(top)) is not None:
            sources.files[top] = reader
        return sources
    for folder, inner, names in os.walk(top):
        parent = Path(folder)
        for name in sorted(inner):
            if (reason := _foreign(parent / name)) is not None:
                sources.left_out[f"{_shown(parent / name, top)}/"] = reason
                inner.remove(name)
        counterparts = _counterparts(inner)
        for name in sorted(inner):
            if (other := counterparts.get(_VENDOR.sub("", name))) and other != name and _VENDOR.search(name):
                sources.left_out[f"{_shown(parent / name, top)}/"] = f"{other}/ {COUNTERPART}"
                inner.remove(name)
        counterparts = _counterparts(names)
        for name in sorted(names):
            reader = reader_of(parent / name)
            if reader is None:
                kind = Path(name).suffix or name
                sources.suffixes[kind] = sources.suffixes.get(kind, 0) + 1
            elif (other := counterparts.get(_VENDOR.sub("", name))) and other != name and _OWN.search(name):
                sources.left_out[_shown(parent / name, top)] = f"{other} {COUNTERPART}"
            else:
                sources.files[parent / name] = reader
    sources.files = dict(sorted(sources.files.items()))
    return sources


def reader_of(file: Path) -> Reader | None:
    """Return the reader for a file, or None if there are no rules for it.

    The reader depends on the name and the folder of the file, and if the name has no suffix, on the first line.
    """
    name = file.name
    for pattern, reader in _READERS:
        if pattern.fullmatch(name):
            return reader
    if file.parent.name == "requirements" and file.suffix in (".txt", ".in"):
        return _REQUIREMENTS
    return _SCRIPT if not file.suffix and _is_shell(file) else None


def _of_python(text: str) -> Iterator[Place]:
    with warnings.catch_warnings():
        # Do not show warnings about escapes in the file's strings.
        warnings.simplefilter("ignore")
        module = Module(text)
    for rule in PYTHON:
        yield from rule(module)


def _of_notebook(text: str) -> Iterator[Place]:
    content = notebook.read(text)
    for place in _of_python(content.text):
        cell, line = content.origin(place.line)
        yield Place(place.rule, line, f"cell {cell}: {place.what}", place.why, place.instead)


def _unread_cells(text: str) -> str:
    unread = notebook.read(text).unread
    cells = ", ".join(f"{number} ({reason})" for number, reason in unread.items())
    return f"cells that are not Python: {cells}" if unread else ""


_REQUIREMENTS = Reader("requirements", requirements.of_requirements)
_DOCKERFILE = Reader("Dockerfile", containers.of_dockerfile)
_SCRIPT = Reader("shell", commands.of_shell)
_READERS = tuple((re.compile(pattern), reader) for pattern, reader in (
    (r".*\.py[iw]?", Reader("Python", _of_python)),
    (r".*\.ipynb", Reader("notebook", _of_notebook, LARGEST_NOTEBOOK, _unread_cells)),
    (r"pyproject\.toml", Reader("pyproject.toml", requirements.of_pyproject)),
    (r"setup\.cfg", Reader("setup.cfg", packaging.of_setup_cfg)),
    (r"(?:.*[-_.])?requirements.*\.(?:txt|in)", _REQUIREMENTS),
    (r".*\.(?:sh|bash|zsh|slurm|sbatch)", _SCRIPT),
    (r"(?:.*[-_.])?(?:Docker|Container)file(?:[-_.].*)?|.*\.[dD]ockerfile", _DOCKERFILE),
    (r"(?:docker-)?compose.*\.ya?ml", Reader("compose", containers.of_compose)),
    (r"(?:.*[-_])?(?:environment|conda)(?:[-_.].*)?\.ya?ml", Reader("conda environment", containers.of_environment)),
    (r"CMakeLists\.txt|.*\.cmake", Reader("CMake", building.of_cmake)),
    (r"(?:.*\.)?(?:GNU)?[mM]akefile|.*\.mk", Reader("Makefile", commands.of_makefile)),
    *((rf".*{re.escape(suffix)}", Reader("C++/CUDA", native.of_native)) for suffix in native.SUFFIXES),
))  # fmt: skip
KINDS = tuple(dict.fromkeys(reader.kind for _, reader in _READERS))


def _counterparts(names: list[str]) -> dict[str, str]:
    """Map names without the vendor to names for ROCm, such as Dockerfile → Dockerfile.rocm or ops → ops-hip."""
    return {_VENDOR.sub("", name): name for name in sorted(names) if _ROCM.search(name)}


def _is_shell(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return bool(_SHELL.match(stream.read(64)))
    except OSError:
        return False


def _foreign(folder: Path) -> str | None:
    """Return the reason why a folder is left out, or None if it is not left out."""
    if folder.is_symlink():
        return "a link to a folder"
    if folder.name in _FOREIGN:
        return "not part of the project"
    return "a virtual environment" if (folder / "pyvenv.cfg").exists() else None


def _shown(path: Path, top: Path) -> str:
    return path.relative_to(top).as_posix()
