"""Results on stdout, as text for people or as JSON for programs, and everything else on stderr.

rich is imported only when a table is printed or a stream is a terminal, so `check_version --json` does not need it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hf_rocm import files
from hf_rocm.errors import HfRocmError, OptionError
from hf_rocm.overlay.locate import Installation
from hf_rocm.overlay.state import GOOD, LISTED, FileState, Installed, LeftOut, some
from hf_rocm.tools.wrapping import width, wrapped

if TYPE_CHECKING:
    from rich.console import Console

# Cells of at most this many characters are not wrapped, except in the header.
_SHORT = 20

THEME = {
    "good": "green", "attention": "yellow", "wrong": "red", "error": "bold red",
    "bar.complete": "green", "bar.finished": "green", "progress.elapsed": "none",
}  # fmt: skip
_STATES = {
    "yes": "good",
    "verified": "good",
    "compatible": "good",
    "old": "attention",
    "foreign": "wrong",
    "edited": "wrong",
    "changed": "wrong",
    "unsupported": "wrong",
}


def check_output(file: Path, *, parents: bool = False) -> None:
    """Raise `OptionError` if this file can't be written, before work starts. parents: missing folders are allowed."""
    try:
        files.check_output(file, parents=parents)
    except OSError as error:
        raise OptionError(
            f"{file} can't be written",
            facts={"because": error.strerror or error},
            hint="specify a file in a writable folder",
        ) from error


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def print_error(error: HfRocmError) -> None:
    """Print the whole error on stderr, wrapped only on a terminal, so that programs can search its lines."""
    lines = _fitted(f"error: {printable(str(error))}") if sys.stderr.isatty() else [f"error: {printable(str(error))}"]
    text = "\n".join(lines)
    print(f"{styled('error:', 'error', sys.stderr)}{text.removeprefix('error:')}", file=sys.stderr)


def printable(text: str) -> str:
    """Escape control and invalid characters, except newlines, because file names may contain anything."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


def print_notice(text: str) -> None:
    note = f"note: {text}"
    print("\n".join(_fitted(note)) if sys.stderr.isatty() else note, file=sys.stderr)


def print_next(text: str) -> None:
    """Print the next step, below the verdict."""
    print_wrapped(f"next: {text}")


def transformers_dict(installation: Installation) -> dict[str, object]:
    """Return the path and version of transformers for the JSON output of `status`."""
    return {"path": str(installation.root), "version": installation.version}


def print_transformers(installation: Installation) -> None:
    print_wrapped(f"transformers {installation.version}  {installation.root}")


def print_states(
    states: Sequence[FileState], left_out: LeftOut | None = None, *, named: bool = False, everything: bool = False
) -> None:
    """Print the files with a problem, then how many overlays are installed and match.

    The files are printed one per line; if there are many, those that need no attention are printed by group. named:
    print all files, one per line, and no counts. everything: print all files with a problem one per line, and the
    others by group.
    """
    single = [state for state in states if named or not _usual(state)]
    if not named and not everything and len(single) > LISTED:
        # The other files need no attention: they stay stock.
        single = [state for state in single if not state.good]
    if single:
        rows = [
            (state.model, state.overlay.id if state.overlay else "-", *_axes(state), state.detail) for state in single
        ]
        print_table(("model", "overlay", "installed", "match", "detail"), rows)
        if not named:
            print()
    usual = [state for state in states if state not in single]
    odd: dict[str, list[str]] = {}
    for state in usual:
        if not _usual(state):
            odd.setdefault(state.match.value, []).append(state.model)
    if odd:
        print_table(("installed", "match", "models"), [("no", match, some(names)) for match, names in odd.items()])
        print()
    if usual and everything:
        keys = [((*_axes(state), state.overlay.directory if state.overlay else "-"), state.model) for state in usual]
        print_groups(("installed", "match", "overlays"), keys)
        print()
    print_left_out(left_out, states[0].release if states else "")
    if not named:
        print_wrapped(_summary(states))


def print_left_out(left_out: LeftOut | None, release: str) -> None:
    """Print how many models with an overlay the installed transformers lacks, and which models stay stock, if any."""
    for sentence in left_out.sentences(release) if left_out else []:
        print_wrapped(sentence)


def print_groups(header: Sequence[str], members: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """Print a table with one row per group. The last column lists the names of its members."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for group, name in members:
        groups.setdefault(group, []).append(name)
    print_table(
        (*header, "models"), [(*group, ", ".join(names)) for group, names in sorted(groups.items(), key=_by_release)]
    )


def _by_release(group: tuple[tuple[str, ...], list[str]]) -> list[list[tuple[int, str]]]:
    """Return a sort key that compares numbers in names as numbers: transformers-5.2 comes before transformers-5.13."""
    return [
        [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", word)] for word in group[0]
    ]


def _usual(state: FileState) -> bool:
    return state.installed in (Installed.YES, Installed.NO) and state.match in GOOD


def _axes(state: FileState) -> tuple[str, str]:
    return state.installed.value, state.match.value


def _summary(states: Sequence[FileState]) -> str:
    """Return, for example, `2 of 110 overlays are installed; all match the installed transformers`.

    Also names what needs attention.
    """
    total = len(states)
    count = sum(state.installed is Installed.YES for state in states)
    matching = sum(state.match in GOOD for state in states)
    share = f"all {total}" if count == total else f"{count or 'none'} of {total}"
    installed = f"{share} overlays {'is' if count < 2 and count < total else 'are'} installed"
    differing = total - matching
    others = f", {differing} {'does' if differing == 1 else 'do'} not" if differing else ""
    match = f"{'all match' if not differing else f'{matching} match'} the installed transformers{others}"
    wrong = [f"{state.model} ({_what_is_wrong(state)})" for state in states if not state.good]
    attention = f"; {len(wrong)} {'need' if len(wrong) > 1 else 'needs'} attention: {', '.join(wrong)}" if wrong else ""
    return f"{installed}; {match}{attention}"


def _what_is_wrong(state: FileState) -> str:
    return state.match.value if state.installed is Installed.YES else state.installed.value


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, as in `table_lines`."""
    print("\n".join(table_lines(header, rows)))


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns. If they don't fit, the cells of the widest columns are wrapped between words.

    Words, such as paths, and short cells below the header are not wrapped. Two spaces separate the columns, or one if
    the table fits only then.
    """
    from rich.table import Table
    from rich.text import Text

    gap, widths = _layout([header, *rows])
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="")
    for title, columns in zip(header, widths, strict=True):
        table.add_column(title, width=columns, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, _STATES.get(cell, "")) for cell in row))
    target = console(sys.stdout, columns=sum(widths) + gap * len(widths))
    with target.capture() as printed:
        target.print(table)
    return [line.rstrip() for line in printed.get().splitlines()]


def _layout(rows: Sequence[Sequence[str]]) -> tuple[int, list[int]]:
    """Return the number of spaces between the columns, and the width of every column."""
    layouts = [(gap, _column_widths(rows, gap)) for gap in (2, 1)]
    fitting = (layout for layout in layouts if sum(layout[1]) + layout[0] * (len(layout[1]) - 1) <= width())
    return next(fitting, layouts[0])


def _column_widths(rows: Sequence[Sequence[str]], gap: int) -> list[int]:
    """Return the width of every column: that of its longest cell.

    If the table is too wide, the widest columns are narrowed, but not below their longest word or short cell.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [
        max(len(part) for number, cell in enumerate(column) for part in ([cell] if number and len(cell) <= _SHORT
                                                                         else cell.split() or [""]))
        for column in columns
    ]  # fmt: skip
    excess = sum(widths) + gap * (len(widths) - 1) - width()
    while excess > 0 and widths != least:
        widest = max(range(len(widths)), key=lambda column: (widths[column] > least[column], widths[column]))
        widths[widest] -= 1
        excess -= 1
    return widths


def print_wrapped(text: str, *, indent: str = "", hanging: str = "  ") -> None:
    """Print a sentence, wrapped between words. indent, hanging: as in `wrapped`."""
    print("\n".join(wrapped(text, width(), indent=indent, hanging=hanging)))


def print_report(text: str) -> None:
    """Print lines that are already aligned. Long lines wrap within their last column, if there is room."""
    for line in _fitted(text):
        print(line)


def _fitted(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if len(line) <= width():
            yield line
            continue
        start = max((gap.end() for gap in re.finditer(r"\S {2,}(?=\S)", line)), default=0)
        if 0 < start <= width() - 40:
            yield from wrapped(line[start:], width(), indent=line[:start], hanging="")
        else:
            indent = " " * (len(line) - len(line.lstrip()))
            yield from wrapped(line[len(indent) :], width(), indent=indent)


def print_facts(facts: Mapping[str, object]) -> None:
    column = max(map(len, facts))
    for label, value in facts.items():
        print_wrapped(str(value), indent=f"{label:<{column}}  ", hanging="")


def shorten(file: Path, root: Path) -> str:
    """Return the path of a file, relative to the folder `root` if the file is in it."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return the text, in a style of `THEME` if the stream is a terminal with colours. NO_COLOR disables them."""
    if not style or not stream.isatty():
        return text
    from rich.text import Text

    target = console(stream, columns=max(width(), len(text)))
    with target.capture() as printed:
        target.print(Text(text, style), end="")
    return printed.get()


def console(stream: TextIO, *, columns: int | None = None) -> Console:
    """Return a rich console on this stream, with the theme. It prints text unchanged: no markup and no highlighting."""
    from rich.console import Console
    from rich.theme import Theme

    return Console(
        file=stream, theme=Theme(THEME), width=columns or width(), highlight=False, markup=False, emoji=False
    )
