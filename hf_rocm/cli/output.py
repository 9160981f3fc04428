"""Printing for people and for programs. Imports nothing heavy: `check_version` uses it too."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hf_rocm.errors import HfRocmError
from hf_rocm.overlay.locate import Installation
from hf_rocm.overlay.state import GOOD, FileState, Installed, LeftOut

_COLOURS = {
    "yes": "32",
    "verified": "32",
    "compatible": "32",
    "old": "33",
    "edited": "31",
    "changed": "31",
    "unsupported": "31",
}


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def print_error(error: HfRocmError) -> None:
    """The error in full, on stderr."""
    print(f"{coloured('error:', '1;31', sys.stderr)} {error}", file=sys.stderr)


def print_notice(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def transformers_dict(installation: Installation) -> dict[str, object]:
    """The transformers that is meant, as every command's JSON has it."""
    return {"path": str(installation.root), "version": installation.version}


class Counter:
    """Progress of long work, redrawn on a terminal's stderr; silent anywhere else."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = 0.0
        self._live = sys.stderr.isatty()

    def __enter__(self) -> Counter:
        return self

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._live and (now - self._last > 0.1 or done == total):
            self._last = now
            print(f"\r{done} of {total} {self._what}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_transformers(installation: Installation) -> None:
    print(f"transformers {installation.version}  {installation.root}")


def print_states(states: Sequence[FileState], left_out: LeftOut | None = None, *, each: bool = False) -> None:
    """How many files are in which state, then the files: those in order by group, others on a line each.

    each: all on a line each, for those who named them.
    """
    if not each:
        print(_summary(states))
    single = [state for state in states if each or not _usual(state)]
    if single:
        if not each:
            print()
        rows = [
            (state.model, state.overlay.id if state.overlay else "-", *_axes(state), state.detail) for state in single
        ]
        print_table(("model", "overlay", "installed", "match", "detail"), rows)
    usual = [state for state in states if state not in single]
    if usual:
        print()
        keys = [((*_axes(state), state.overlay.directory if state.overlay else "-"), state.model) for state in usual]
        print_groups(("installed", "match", "overlays"), keys)
    print_left_out(left_out, states[0].release if states else "")


def print_left_out(left_out: LeftOut | None, release: str) -> None:
    """The models without a file of ours, if there are any."""
    sentences = left_out.sentences(release) if left_out else []
    if sentences:
        print()
    for sentence in sentences:
        print(textwrap.fill(sentence, width(), subsequent_indent="  ", break_long_words=False))


def print_groups(header: Sequence[str], members: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """A table with a row for each group, and the names of its members, wrapped, in the last column."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for group, name in members:
        groups.setdefault(group, []).append(name)
    taken = sum(max(map(len, column)) + 2 for column in zip(header, *groups, strict=True))
    rows: list[tuple[str, ...]] = []
    for group, names in sorted(groups.items()):
        first, *rest = textwrap.wrap(", ".join(names), max(width() - taken, 40), break_on_hyphens=False)
        rows += [(*group, first), *((*("" for _ in group), line) for line in rest)]
    print_table((*header, "models"), rows)


def _usual(state: FileState) -> bool:
    return state.installed in (Installed.YES, Installed.NO) and state.match in GOOD


def _axes(state: FileState) -> tuple[str, str]:
    return state.installed.value, state.match.value


def _summary(states: Sequence[FileState]) -> str:
    def counted(values: Iterable[str]) -> str:
        found = list(values)
        return ", ".join(f"{found.count(value)} {value}" for value in dict.fromkeys(found))

    installed = counted(state.installed.value for state in states)
    return f"{len(states)} files; installed: {installed}; match: {counted(state.match.value for state in states)}"


def width() -> int:
    """Columns of the terminal, 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; states are coloured on a terminal, and the words say it all without."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for number, row in enumerate((header, *rows)):
        cells = [cell.ljust(room) for cell, room in zip(row, widths, strict=True)]
        painted = [coloured(cell, _COLOURS.get(cell.strip(), ""), sys.stdout) for cell in cells]
        print("  ".join(painted if number else cells).rstrip())


def print_facts(facts: Mapping[str, object]) -> None:
    column = max(map(len, facts))
    for label, value in facts.items():
        print(f"{label:<{column}}  {value}")


def shorten(file: Path, root: Path) -> str:
    """A stock file's path below the package."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


def coloured(text: str, colour: str, stream: object) -> str:
    """The text in a colour (`1;31`), if the stream is a terminal."""
    if not colour or not getattr(stream, "isatty", bool)():
        return text
    return f"\033[{colour}m{text}\033[0m"
