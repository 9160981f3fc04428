"""Printing for people and for programs. Imports nothing heavy: `check_version` uses it too."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hf_rocm.errors import HfRocmError
from hf_rocm.overlay.locate import Installation
from hf_rocm.overlay.state import FileState

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
    print(f"{_coloured('error:', '1;31', sys.stderr)} {error}", file=sys.stderr)


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


def print_states(states: Iterable[FileState]) -> None:
    """One line a file, on both axes."""
    rows = [
        (
            state.model,
            state.overlay.id if state.overlay else "-",
            state.installed.value,
            state.match.value,
            state.detail,
        )
        for state in states
    ]
    print_table(("model", "overlay", "installed", "match", "detail"), rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; states are coloured on a terminal, and the words say it all without."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for number, row in enumerate((header, *rows)):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        coloured = [_coloured(cell, _COLOURS.get(cell.strip(), ""), sys.stdout) for cell in cells]
        print("  ".join(coloured if number else cells).rstrip())


def print_facts(facts: Mapping[str, object]) -> None:
    width = max(map(len, facts))
    for label, value in facts.items():
        print(f"{label:<{width}}  {value}")


def shorten(file: Path, root: Path) -> str:
    """A stock file's path below the package."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


def _coloured(text: str, colour: str, stream: object) -> str:
    if not colour or not getattr(stream, "isatty", bool)():
        return text
    return f"\033[{colour}m{text}\033[0m"
