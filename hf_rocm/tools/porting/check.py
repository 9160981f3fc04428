"""Read a file or a tree of files, and collect the findings of the rules."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_rocm.errors import HfRocmError
from hf_rocm.tools.porting.findings import Finding, Place, Severity
from hf_rocm.tools.porting.rules import RULES, native
from hf_rocm.tools.porting.sources import KINDS, collect

_SILENT = re.compile(r"hf-rocm:\s*ignore(?:\[([\w, -]+)\])?")


@dataclass(frozen=True)
class Report:
    """The findings under a path.

    kinds: kind → the number of files that were read. unread: path → why a file for which there are rules could not be
    read. left_out: path → why a file, a part of a file, or a folder (its path ends in a slash) was not read. suffixes:
    suffix, or the name of a file without a suffix → the number of such files, for which there are no rules.
    """

    path: str
    files: int
    findings: tuple[Finding, ...]
    silenced: int
    unread: dict[str, str]
    kinds: dict[str, int]
    left_out: dict[str, str]
    suffixes: dict[str, int]
    rules: int = len(RULES)

    @property
    def problems(self) -> int:
        return sum(finding.severity is Severity.PROBLEM for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        return {
            "path": self.path,
            "files": self.files,
            "counts": {
                severity.value: sum(finding.severity is severity for finding in self.findings) for severity in Severity
            },
            "findings": [finding.to_dict() for finding in self.findings],
            "silenced": self.silenced,
            "unread": self.unread,
            "rules": self.rules,
            "read": [{"kind": kind, "files": number} for kind, number in self.kinds.items()],
            "left_out": [{"path": path, "why": reason} for path, reason in self.left_out.items()],
            "without_rules": [{"suffix": suffix, "files": number} for suffix, number in self.suffixes.items()],
        }


def check(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Report:
    """Check a file or a folder, without running or importing anything in it.

    Reads Python, notebooks, shell scripts, Dockerfiles, compose files, CMake files, Makefiles, files that declare
    packages (pyproject.toml, setup.cfg, requirements, conda environments), and C, C++ and CUDA. Virtual environments,
    folders such as .git and __pycache__, links to folders, and files and folders that have a counterpart for ROCm are
    skipped. progress(done, total) is called after each file. Raises `HfRocmError` if the path does not exist or
    contains no file of these kinds.
    """
    top = Path(path)
    if not top.exists():
        raise HfRocmError("this path does not exist", facts={"path": top}, hint="pass a file or a folder")
    sources = collect(top)
    if not sources.files:
        raise HfRocmError(
            "there is no file here that port-check reads",
            facts={"path": top, "reads": f"*.py, *.ipynb, *.sh, and {', '.join(KINDS[2:])}"},
            hint="pass the folder of your model's code",
        )
    findings: list[Finding] = []
    unread: dict[str, str] = {}
    left_out, kinds = dict(sources.left_out), Counter[str]()
    silenced, translated = 0, False
    for number, (file, reader) in enumerate(sources.files.items(), 1):
        relative = file.relative_to(top).as_posix() if file != top else file.name
        try:
            _check_inside(file, top)
            text = _text(file, reader.largest)
            places = list(reader.places(text))
            unread_parts = reader.unread_parts(text) if reader.unread_parts else ""
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unread[relative] = _reason_of(error)
        else:
            kinds[reader.kind] += 1
            if unread_parts:
                left_out[relative] = unread_parts
            translated = translated or native.defines_shuffles(text)
            silent = _Silenced(text)
            reported = [place for place in places if not silent.has(place)]
            silenced += len(places) - len(reported)
            findings += [place.within(relative) for place in sorted(reported, key=lambda place: place.line)]
        if progress is not None:
            progress(number, len(sources.files))
    # The project defines its own warp shuffles for HIP.
    if translated:
        findings = [finding for finding in findings if finding.rule != native.BALLOT.name]
    return Report(
        path=str(path),
        files=len(sources.files) - len(unread),
        findings=tuple(findings),
        silenced=silenced,
        unread=unread,
        kinds=dict(kinds.most_common()),
        left_out=left_out,
        suffixes=dict(Counter(sources.suffixes).most_common()),
    )


def _text(file: Path, largest: int) -> str:
    if file.stat().st_size > largest:
        raise ValueError(f"larger than {largest >> 20} MiB")
    if not file.is_file():
        raise ValueError("not a regular file")
    return file.read_bytes().decode("utf-8-sig")


def _check_inside(file: Path, top: Path) -> None:
    """Refuse a link to a file outside the tree, since the user may not want that file to be quoted."""
    if file != top and file.is_symlink() and not file.resolve().is_relative_to(top.resolve()):
        raise ValueError("a link to a file outside the folder")


class _Silenced:
    """The lines of a file on which a comment suppresses findings. No line is read twice."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        # Line → suppressed rules; None: all rules.
        self._rules: dict[int, frozenset[str] | None] = {}

    def has(self, place: Place) -> bool:
        if place.line not in self._rules:
            self._rules[place.line] = self._read(place.line)
        rules = self._rules[place.line]
        return rules is None or place.rule.name in rules

    def _read(self, line: int) -> frozenset[str] | None:
        comment = _SILENT.search(self._lines[line - 1]) if 0 < line <= len(self._lines) else None
        if comment is None:
            return frozenset()
        return None if comment[1] is None else frozenset(re.split(r"[,\s]+", comment[1]))


def _reason_of(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if isinstance(error, SyntaxError):
        return f"this Python ({platform.python_version()}) can't parse it: {error.msg}, line {error.lineno}"
    return str(error) or type(error).__name__
