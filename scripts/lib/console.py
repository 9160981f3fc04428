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


def say(text: str = "") -> None:
    print(text, flush=True)


def columns() -> int:
    """The width of the terminal, at least 60; 120 without a terminal."""
    return max(60, shutil.get_terminal_size((120, 24)).columns)


def paragraph(text: str) -> None:
    """Print a paragraph, wrapped between words."""
    say(textwrap.fill(" ".join(text.split()), columns(), initial_indent="  ", subsequent_indent="  "))


def quoted(text: str) -> None:
    """Print the output of another process, with a bar before every line. Lines that are too long are wrapped."""
    for one in text.strip().splitlines():
        for part in textwrap.wrap(one, columns() - 4, subsequent_indent="  ", break_long_words=False) or [""]:
            say(f"  │ {part}".rstrip())


def heading(text: str) -> None:
    say(f"\n{styled(text, 'bold')}")


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"


def line(title: str, result: str, style: str, seconds: float | None = None) -> None:
    """Print a finished step: title, result and duration."""
    took = "" if seconds is None else f"  {styled(duration(seconds), 'dim')}"
    say(f"  {title:<48} {styled(result, style)}{took}")


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print the title of a step, then whether it succeeded, and its duration."""
    began = time.monotonic()
    if live():
        print(f"  {title} {styled('…', 'dim')}", end="\r", flush=True)
    else:
        say(f"  {title} …")
    try:
        yield
    except BaseException:
        line(title, "failed", "red", time.monotonic() - began)
        raise
    line(title, "done", "green", time.monotonic() - began)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "  ") -> None:
    """Print columns as wide as their contents. The first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def render(row: Sequence[str]) -> str:
        first = f"{row[0]:<{widths[0]}}"
        others = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        return indent + "  ".join([first, *others]).rstrip()

    say(styled(render(header), "dim"))
    for row in rows:
        say(render(row))


def entry_point(main: Callable[[Sequence[str]], int]) -> None:
    """Run a script. The exit code is the value of `main`, 1 (with a message) on failure, or 130 or 143 on a signal."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are terminated too
    try:
        sys.exit(main(sys.argv[1:]))
    except ScriptError as error:
        sys.exit(f"\n{styled('error', 'red')}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
