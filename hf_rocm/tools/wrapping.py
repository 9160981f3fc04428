"""Wrap text to the width of the terminal, for the commands, `explain`, `verify` and `check_version`.

This module imports only the standard library, so that `check_version` is cheap to import.
"""

from __future__ import annotations

import shutil
import textwrap

# The limits of the width in columns.
NARROWEST, WIDEST = 60, 200


def width() -> int:
    """Return the width of text in columns: the width of the terminal, within limits, or 120 without a terminal."""
    return min(max(shutil.get_terminal_size((120, 24)).columns, NARROWEST), WIDEST)


def wrapped(text: str, columns: int, *, indent: str = "", hanging: str = "  ") -> list[str]:
    """Wrap a sentence into lines. Words, which may be paths or commands, are never broken.

    indent: the indent of the first line. hanging: the additional indent of later lines.
    """
    return textwrap.wrap(
        text, columns, initial_indent=indent, subsequent_indent=" " * len(indent) + hanging,
        break_long_words=False, break_on_hyphens=False,
    ) or [indent.rstrip()]  # fmt: skip
