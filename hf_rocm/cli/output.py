"""Printing for people and for programs. Imports nothing heavy: `check_version` uses it too."""

from __future__ import annotations

import json
import sys
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
