"""Text wrapped at the columns of the terminal, for the commands, `explain` and `check_version`.

It imports only the standard library, so that `check_version` stays cheap.
"""

from __future__ import annotations

import shutil
import textwrap

NARROWEST, WIDEST = 60, 200  # columns that text is wrapped at


def width() -> int:
    """The columns that text is wrapped at: those of the terminal within limits, 120 without one."""
    return min(max(shutil.get_terminal_size((120, 24)).columns, NARROWEST), WIDEST)


def wrapped(text: str, columns: int, *, indent: str = "", hanging: str = "  ") -> list[str]:
    """The lines of a sentence. Words, which may be paths or commands, are never broken.

    indent: of the first line; hanging: the additional indent of later lines.
    """
    return textwrap.wrap(
        text, columns, initial_indent=indent, subsequent_indent=" " * len(indent) + hanging,
        break_long_words=False, break_on_hyphens=False,
    ) or [indent.rstrip()]  # fmt: skip
