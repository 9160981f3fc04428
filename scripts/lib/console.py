"""Progress lines with durations, and tables, readable on a terminal and in a log."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class ScriptError(Exception):
    """An error for the user: a sentence, optionally with the end of a log and a hint."""


def live() -> bool:
    """Whether lines may be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    if not live() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def echo(text: str = "") -> None:
    print(text, flush=True)


def columns() -> int:
    """The width of the terminal, from 60 to 200; 120 without a terminal."""
    return min(max(shutil.get_terminal_size((120, 24)).columns, 60), 200)


def wrapped(text: str, first: str = "", later: str = "  ", *, break_words: bool = False) -> list[str]:
    """Wrap a line between words to the width of the terminal.

    first, later: what the first line and the later lines begin with. break_words: also break words that are longer
    than a line; by default such words are not broken, because they may be paths or commands.
    """
    return textwrap.wrap(
        text, columns(), initial_indent=first, subsequent_indent=later, break_long_words=break_words,
        break_on_hyphens=False,
    ) or [first.rstrip()]  # fmt: skip


def paragraph(text: str, first: str = "  ", later: str = "  ") -> None:
    """Print a paragraph, wrapped between words. first, later: as in `wrapped`."""
    echo("\n".join(wrapped(" ".join(text.split()), first, later)))


def quoted(text: str, *, break_words: bool = False) -> None:
    """Print the output of another process, with a bar before every line. Lines that are too long are wrapped."""
    for one in text.strip().splitlines():
        for part in wrapped(one, "  │ ", "  │   ", break_words=break_words):
            echo(part)


def heading(text: str) -> None:
    echo()
    for part in wrapped(text):
        echo(styled(part, "bold"))


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"


def line(title: str, result: str, style: str, seconds: float | None = None) -> None:
    """Print a finished step: title, result and duration, on two lines if they don't fit on one."""
    elapsed = "" if seconds is None else f"  {duration(seconds)}"
    if len(title) + len(result + elapsed) + 3 > columns():
        *lines, title = [*wrapped(title, "  ", "    "), "  "]
        echo("\n".join(lines))
    echo(f"  {title:<{min(48, columns() - 20)}} {styled(result, style)}{styled(elapsed, 'dim')}")


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print the title of a step, then whether it succeeded, and its duration."""
    began = time.monotonic()
    if live():
        # Only one line can be redrawn.
        shown = title if len(title) + 4 < columns() else title[: columns() - 5]
        print(f"  {shown} {styled('…', 'dim')}", end="\r", flush=True)
    else:
        paragraph(f"{title} …", later="    ")
    result, style = "failed", "red"
    try:
        yield
        result, style = "done", "green"
    finally:
        if live():
            print("\x1b[2K", end="")
        line(title, result, style, time.monotonic() - began)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "  ") -> None:
    """Print columns as wide as their contents. The first column is left-aligned, the others right-aligned.

    If they don't fit, the cells of the first column are wrapped between words. Columns that still don't fit follow in
    further tables with the same first column.
    """
    everything = [header, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(header))]
    room = columns() - len(indent)
    word = max(len(word) for row in everything for word in row[0].split() or [""])
    first = min(widths[0], max(word, 20, room - sum(2 + width for width in widths[1:])))
    groups: list[list[int]] = [[]]
    for column, width in enumerate(widths[1:], 1):
        if groups[-1] and first + sum(2 + widths[other] for other in groups[-1]) + 2 + width > room:
            groups.append([])
        groups[-1].append(column)
    for number, group in enumerate(groups):
        if number:
            echo()
        for index, row in enumerate(everything):
            label, *more = textwrap.wrap(row[0], max(first, 1), break_on_hyphens=False) or [""]
            cells = [f"{label:<{first}}", *(f"{row[column]:>{widths[column]}}" for column in group)]
            for text in ["  ".join(cells), *more]:
                echo(styled(f"{indent}{text}".rstrip(), "dim") if index == 0 else f"{indent}{text}".rstrip())


def entry_point(main: Callable[[Sequence[str]], int]) -> None:
    """Run a script. The exit code is the value of `main`, 1 (with a message) on failure, or 130 or 143 on a signal."""
    # Exit on SIGTERM, so that child processes are terminated too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except ScriptError as error:
        text = str(error)
        if sys.stderr.isatty():
            text = "\n".join(part for one in text.splitlines() for part in wrapped(one))
        sys.exit(f"\n{styled('error', 'red')}: {text}")
    except KeyboardInterrupt:
        sys.exit(130)
