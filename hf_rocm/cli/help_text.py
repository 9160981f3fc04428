"""The layout of help pages: words are never broken or truncated, and lines are wrapped to the terminal's width.

Help pages have at most 120 columns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from hf_rocm.tools.wrapping import width, wrapped

# The largest width of a help page, in columns.
_WIDEST = 120
# The largest width of the first column; after a longer name, the text starts on the next line.
_COLUMN = 30


class HelpText:
    """The formatter to which click's commands write their help."""

    def __init__(self) -> None:
        self.width = min(width(), _WIDEST)
        self.current_indent = 0
        self._lines: list[str] = []

    def write(self, text: str) -> None:
        self._lines += text.splitlines()

    def indent(self) -> None:
        self.current_indent += 2

    def dedent(self) -> None:
        self.current_indent -= 2

    def write_usage(self, program: str, arguments: str = "", prefix: str | None = None) -> None:
        start = f"{prefix or 'Usage: '}{program} "
        # Some releases of typer write braces around the name of a required argument.
        arguments = re.sub(r"\{(\w+)\}", r"\1", arguments)
        self._lines += wrapped(arguments, self.width, indent=start, hanging="")

    def write_heading(self, heading: str) -> None:
        self._lines.append(" " * self.current_indent + f"{heading}:")

    def write_paragraph(self) -> None:
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def write_text(self, text: str) -> None:
        """Write paragraphs. They are wrapped again, because their line breaks come from the source code."""
        for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
            self.write_paragraph()
            words = " ".join(paragraph.split())
            self._lines += wrapped(words, self.width, indent=" " * self.current_indent, hanging="")

    def write_dl(self, rows: Sequence[tuple[str, str]], **_: Any) -> None:
        rows = [(re.sub(r" <[^<>]*>$", "", name), " ".join(text.split())) for name, text in rows]
        margin = " " * self.current_indent
        column = min(max((len(name) for name, _ in rows), default=0), _COLUMN)
        for name, text in rows:
            start = f"{margin}{name:<{column}}  "
            if len(name) > column:
                self._lines.append(f"{margin}{name}")
                start = f"{margin}{'':<{column}}  "
            self._lines += wrapped(text, self.width, indent=start, hanging="")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.write_paragraph()
        self.write_heading(name)
        self.indent()
        try:
            yield
        finally:
            self.dedent()

    @contextmanager
    def indentation(self) -> Iterator[None]:
        self.indent()
        try:
            yield
        finally:
            self.dedent()

    def getvalue(self) -> str:
        return "".join(f"{line.rstrip()}\n" for line in self._lines)


class Command(typer.core.TyperCommand):
    """A command whose help is formatted by `HelpText`."""

    def get_help(self, ctx: Any) -> str:
        return help_of(self, ctx)


class Group(typer.core.TyperGroup):
    """A group whose help is formatted by `HelpText`."""

    def get_help(self, ctx: Any) -> str:
        return help_of(self, ctx)


def help_of(command: Any, ctx: Any) -> str:
    text = HelpText()
    command.format_help(ctx, text)
    return text.getvalue().rstrip("\n")
