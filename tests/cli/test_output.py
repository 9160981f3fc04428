"""Text on narrow and wide terminals and in pipes: nothing is truncated, words are not split, and only terminals get
colours."""

from __future__ import annotations

import io
import re
import sys

import pytest

from hf_rocm.cli import output
from hf_rocm.cli.progress import Progress
from hf_rocm.errors import OptionError
from hf_rocm.tools import wrapping

HEADER = ("state", "spread", "file", "words")
ROW = ("verified", "233 (233–233)", "/a/rather/long/path/to/some/modeling_llama.py", "some words " * 30)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make both streams terminals with colours."""
    stream = Terminal()
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize(("columns", "used"), [(20, 60), (60, 60), (80, 80), (200, 200), (500, 200), (None, 120)])
def test_the_width_is_that_of_the_terminal_within_limits(
    columns: int | None, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    assert wrapping.width() == used


@pytest.mark.parametrize("columns", [100, 120, 200])
def test_a_table_wraps_its_words_and_keeps_paths_and_short_cells_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    output.print_table(HEADER, [ROW])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(HEADER) and len(lines) > 2
    assert all(len(line) <= columns and line == line.rstrip() for line in lines)
    assert f"{ROW[0]}  {ROW[1]}  {ROW[2]}  some words" in lines[1]
    assert " ".join(lines).split().count("words") == 31


def test_a_table_that_cannot_fit_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output.print_table(HEADER, [ROW])
    shown = capsys.readouterr().out
    assert ROW[1] in shown and ROW[2] in shown and shown.split().count("words") == 31


def test_a_table_that_fits_only_with_narrow_gaps_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    # With a width of 20, the table doesn't fit at all.
    for width, gap in ((18, 2), (19, 1), (20, 2)):
        output.print_table(("a", "b", "c"), [[letter * width for letter in "abc"]])
        assert capsys.readouterr().out.splitlines()[1] == (" " * gap).join(letter * width for letter in "abc")


def test_a_long_line_continues_below_its_last_column_or_with_a_deeper_indent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output.print_report(f"short\nprompt  passed  {'x ' * 40}\n    not aiter: {'y ' * 40}")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "short" and all(len(line) <= 80 for line in lines)
    assert lines[1].startswith("prompt  passed  x") and lines[2].startswith(" " * 16 + "x")
    assert lines[3].startswith("    not aiter: y") and lines[4].startswith(" " * 6 + "y")


def test_a_terminal_has_colours_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    output.print_table(("installed",), [("yes",)])
    assert output.styled("error:", "error", terminal).startswith("\033[1;31m")
    assert "\033[32myes" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31" not in output.styled("error:", "error", terminal)
    assert output.styled("error:", "error", io.StringIO()) == "error:"


def test_errors_are_wrapped_on_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    error = OptionError("some words " * 10, facts={"file": "x " * 60}, hint="other words " * 10)
    output.print_error(error)
    assert max(map(len, capsys.readouterr().err.splitlines())) > 100
    terminal = use_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    output.print_error(error)
    shown = re.sub(r"\033\[\d*m", "", terminal.getvalue())
    assert max(map(len, shown.splitlines())) <= 60 and shown.startswith("error: some words")
    assert " ".join(shown.split()) == " ".join(f"error: {error}".split())


def test_progress_is_one_line_on_a_terminal_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with Progress("files read") as progress:
        progress.count(1, 2)
        progress.count(2, 2)
    assert "2 of 2 files read" in terminal.getvalue() and terminal.getvalue().endswith("\033[2K")
    with Progress() as progress:
        progress.step("loading")
    assert "loading" in terminal.getvalue()


@pytest.mark.parametrize(("every", "lines"), [(None, []), (0.0, ["one", "two"]), (60.0, ["one"])])
def test_progress_without_a_terminal_is_an_occasional_line(
    every: float | None, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(every=every) as progress:
        progress.step("one")
        progress.step("two")
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.splitlines() == lines
