"""Read a file or a tree of files and collect what the rules find."""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_rocm.errors import HfRocmError
from hf_rocm.porting.findings import Finding, Place, Severity
from hf_rocm.porting.module import Module
from hf_rocm.porting.rules import PYTHON, native, requirements

LARGEST = 2 * 1024 * 1024  # bytes; nobody writes more by hand
_FOREIGN = {".git", ".hg", ".svn", "__pycache__", "node_modules", "site-packages", ".venv", "venv", ".tox", ".eggs"}
_SILENT = re.compile(r"hf-rocm:\s*ignore(?:\[([\w, -]+)\])?")


@dataclass(frozen=True)
class Report:
    """What was found under a path. unread: path → why a file that belongs to it could not be read."""

    path: str
    files: int
    findings: tuple[Finding, ...]
    silenced: int
    unread: dict[str, str]

    @property
    def problems(self) -> int:
        return sum(each.severity is Severity.PROBLEM for each in self.findings)

    def to_dict(self) -> dict[str, object]:
        counts = {each.value: sum(found.severity is each for found in self.findings) for each in Severity}
        return {
            "path": self.path,
            "files": self.files,
            "counts": counts,
            "findings": [each.to_dict() for each in self.findings],
            "silenced": self.silenced,
            "unread": self.unread,
        }


def check(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Report:
    """Look at a file or a folder; nothing in it is run or imported.

    Python, pyproject.toml, requirements*.txt and C, C++ or CUDA sources are read; virtual environments, caches and
    links to folders are left out. progress(done, total): called after each file.
    Raises HfRocmError if the path isn't there, or holds nothing that is read.
    """
    top = Path(path)
    if not top.exists():
        raise HfRocmError("there is nothing to check", facts={"path": top}, hint="give a file or a folder")
    files = [top] if top.is_file() else sorted(_files(top))
    files = [file for file in files if _reader(file) is not None]
    if not files:
        raise HfRocmError(
            "there is nothing that port-check reads",
            facts={"path": top, "reads": f"*.py, pyproject.toml, requirements*.txt, {', '.join(native.SUFFIXES)}"},
            hint="give the folder of your model's code",
        )
    findings: list[Finding] = []
    unread: dict[str, str] = {}
    silenced, translated = 0, False
    for number, file in enumerate(files, 1):
        shown = file.relative_to(top).as_posix() if file != top else file.name
        try:
            text = _text(file)
            places = list(_places(file, text))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unread[shown] = _why(error)
        else:
            translated = translated or native.defines_shuffles(text)
            heard = [place for place in places if not _silenced(text, place)]
            silenced += len(places) - len(heard)
            findings += [place.within(shown) for place in sorted(heard, key=lambda each: each.line)]
        if progress is not None:
            progress(number, len(files))
    if translated:  # the project brings its own warp functions for HIP
        findings = [each for each in findings if each.rule != native.BALLOT.name]
    return Report(str(path), len(files) - len(unread), tuple(findings), silenced, unread)


def _files(top: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(top):
        inner[:] = [
            each for each in inner if each not in _FOREIGN and not (Path(folder) / each / "pyvenv.cfg").exists()
        ]
        yield from (Path(folder) / name for name in names)


def _reader(file: Path) -> Callable[[str], Iterator[Place]] | None:
    if file.suffix == ".py":
        return _of_python
    if file.name == "pyproject.toml":
        return requirements.of_pyproject
    if re.fullmatch(r"requirements.*\.(txt|in)", file.name) or file.match("requirements/*.txt"):
        return requirements.of_requirements
    return native.of_native if file.suffix in native.SUFFIXES else None


def _places(file: Path, text: str) -> Iterator[Place]:
    reader = _reader(file)
    assert reader is not None
    return reader(text)


def _of_python(text: str) -> Iterator[Place]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the file's own string escapes
        module = Module(text)
    for rule in PYTHON:
        yield from rule(module)


def _text(file: Path) -> str:
    if file.stat().st_size > LARGEST:
        raise ValueError(f"larger than {LARGEST >> 20} MiB")
    if not file.is_file():
        raise ValueError("not a regular file")
    return file.read_bytes().decode("utf-8-sig")


def _silenced(text: str, place: Place) -> bool:
    lines = text.splitlines()
    found = _SILENT.search(lines[place.line - 1]) if 0 < place.line <= len(lines) else None
    return found is not None and (found[1] is None or place.rule.name in re.split(r"[,\s]+", found[1]))


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not text in UTF-8"
    if isinstance(error, SyntaxError):
        return f"this Python ({platform.python_version()}) can't parse it: {error.msg}, line {error.lineno}"
    return str(error) or type(error).__name__
