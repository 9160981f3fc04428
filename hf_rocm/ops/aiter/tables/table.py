"""Read a table of tuned GEMMs, and report its problems with their lines.

The file may come from a user or another machine, and it may be damaged. So the numbers of bytes, rows and columns,
and of reported problems, are limited.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hf_rocm.errors import TableError
from hf_rocm.ops.aiter.tables.columns import GFX_OF_UNITS, RENAMED, Layout, layouts_with, libraries, releases_of

# All tables in aiter 0.1.20 together take 0.6 MB.
MAX_BYTES = 64 << 20
MAX_ROWS = 400_000
MAX_COLUMNS = 100
# The largest number of problems that are reported; enough to fix a file.
MAX_PROBLEMS = 20

DTYPES = frozenset(
    f"torch.{name}" for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
)
_FLAGS = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
_EMPTY = ("", "Null", "null", "NULL", "None", "nan", "NaN", "NA")
_GFX = re.compile(r"gfx[0-9a-f]{3,5}")
_LARGEST = 2**31 - 1


class Key(NamedTuple):
    """The GEMM and GPU of a row. gfx: None if neither the table nor the number of compute units determines it."""

    gfx: str | None
    units: int
    m: int
    n: int
    k: int
    bias: bool
    dtype: str
    outdtype: str
    scaled: bool
    shuffled: bool

    def looked_up(self, layout: Layout) -> Key:
        """The key as releases with this layout compare it: without gfx if they ignore that column."""
        return self if "gfx" in layout.key else self._replace(gfx=None)


class Row(NamedTuple):
    """One row. us: the time in µs, or None if the tuner found no kernel.

    values: the fields by the layout's column names, without surrounding spaces; gfx is filled in if the layout has this
    column and the table does not.
    """

    line: int
    key: Key
    us: float | None
    values: dict[str, str]


class Problem(NamedTuple):
    """One problem in a file, and its line."""

    line: int
    text: str


@dataclass
class Table:
    """The content of a file. problems: why aiter can't use the file as it is; rows: the rows without a problem."""

    path: Path
    columns: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    more_problems: int = 0
    notes: list[str] = field(default_factory=list)
    lacks_gfx: bool = False

    def report(self, line: int, text: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(line, text))
        else:
            self.more_problems += 1

    def refuse(self, release: str) -> None:
        """Raise `TableError` if there are problems, naming their lines."""
        if not self.problems:
            return
        facts: dict[str, object] = {"file": self.path}
        for line, text in self.problems:
            label = f"line {line}"
            facts[label] = f"{facts[label]}; {text}" if label in facts else text
        if self.more_problems:
            facts["and"] = f"{self.more_problems} more"
        raise TableError(
            f"{self.path.name} is not a table that amd-aiter {release} can use",
            facts=facts,
            hint="correct or delete these lines, and tune again if necessary (hf-rocm tune MODEL)",
        )


def read(path: Path, layout: Layout, release: str) -> Table:
    """Read a tuned table for this release. Raises `TableError` if the file is not such a table.

    Problems of single lines do not raise an error; they are recorded in the result.
    """
    text = text_of(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header, read_rows = _next(reader, path), 1
    while header is not None and not any(header):
        header, read_rows = _next(reader, path), read_rows + 1
        _check_count(path, read_rows, reader.line_num)
    if header is None:
        raise TableError(f"{path.name} is empty", facts={"file": path, "expected": ",".join(layout.tuned)})
    columns = _columns(path, reader.line_num, header, layout, release)
    table = Table(path, columns, lacks_gfx="gfx" in layout.tuned and "gfx" not in columns)
    ignored = [name for name in columns if name and name not in layout.tuned and name != "gfx"]
    if ignored:
        table.notes.append(
            f"amd-aiter {release} does not read the column{'s' * (len(ignored) > 1)} {', '.join(ignored)}"
        )
    if table.lacks_gfx and "gfx" in layout.key:
        table.report(reader.line_num, "there is no column gfx (`hf-rocm tune merge` fills it in)")
    known = libraries(release)
    line = reader.line_num + 1
    while (fields := _next(reader, path)) is not None:
        read_rows += 1
        _check_count(path, read_rows, line)
        if len(fields) > MAX_COLUMNS or any(field.strip() for field in fields):
            _row(table, line, fields, layout, known)
        line = reader.line_num + 1
    _repeated(table, layout)
    table.problems.sort(key=lambda problem: problem.line)
    return table


def _check_count(path: Path, rows: int, line: int) -> None:
    """Raise `TableError` if there are too many rows, whether valid, invalid or empty.

    rows: their number so far, including the header.
    """
    if rows > MAX_ROWS + 1:
        raise TableError(f"{path.name} has more than {MAX_ROWS} rows", facts={"file": path, "line": line})


def text_of(path: Path) -> str:
    """The text of the file. Raises `TableError` if it is not a readable text file within the size limit."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TableError(
                    f"{path.name or path} is not a regular file", facts={"path": path, "expected": "a CSV file"}
                )
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        # A path with a NUL byte raises ValueError.
        if isinstance(error, IsADirectoryError):
            raise TableError(f"{path} is a folder", facts={"expected": "a CSV file"}) from error
        raise TableError(
            f"{path.name or path} can't be read",
            facts={"path": path, "system error": getattr(error, "strerror", None) or error},
        ) from error
    if len(data) > MAX_BYTES:
        raise TableError(
            f"{path.name} is larger than any table of tuned GEMMs",
            facts={"file": path, "size limit": f"{MAX_BYTES >> 20} MiB"},
        )
    nul = data.find(b"\0")
    if nul >= 0:
        raise _unreadable(path, data.count(b"\n", 0, nul) + 1, "a NUL byte: this is not a text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(path, line, f"the byte 0x{data[error.start]:02x} is not UTF-8 text") from error


def _next(reader: object, path: Path) -> list[str] | None:
    try:
        return next(reader, None)  # type: ignore[call-overload]
    except csv.Error as error:
        raise _unreadable(path, max(1, reader.line_num), f"not CSV: {error}") from error  # type: ignore[attr-defined]


def _unreadable(path: Path, line: int, text: str) -> TableError:
    return TableError(f"{path.name} is not a CSV file", facts={"file": path, f"line {line}": text})


def _columns(path: Path, line: int, header: list[str], layout: Layout, release: str) -> tuple[str, ...]:
    """The column names, stripped. Raises `TableError` if releases with this layout can't read them."""
    if len(header) > MAX_COLUMNS:
        raise _unreadable(path, line, f"{len(header)} columns")
    columns = tuple(name.strip() for name in header)
    repeated = sorted({name for name in columns if name and columns.count(name) > 1})
    missing = [name for name in layout.tuned if name not in columns and name != "gfx"]
    too_new = "bpreshuffle" in columns and not layout.shuffled
    if not repeated and not missing and not too_new:
        return columns
    if repeated:
        problem = f"the column {repeated[0][:60]!r} appears twice"
    elif too_new:
        problem = "bpreshuffle is a column of later releases"
    else:
        problem = f"missing column{'s' * (len(missing) > 1)}: {', '.join(missing)}"
    facts: dict[str, object] = {"file": path, f"line {line}": problem, "expected": ",".join(layout.tuned)}
    other = layouts_with(columns)
    if other:
        facts["found"] = f"the columns of amd-aiter {releases_of(other)}"
    raise TableError(
        f"{path.name} is not a table of tuned GEMMs of amd-aiter {release}",
        facts=facts,
        hint="kernels differ between these releases; tune again with this one (hf-rocm tune MODEL)" if other else None,
    )


def _row(table: Table, line: int, fields: list[str], layout: Layout, known: frozenset[str]) -> None:
    if len(fields) != len(table.columns):
        table.report(line, f"expected {len(table.columns)} fields, as in the header, got {len(fields)}")
        return
    values = {name: value.strip() for name, value in zip(table.columns, fields, strict=True) if name}
    try:
        key = _key(values)
        us = _time_of(values, layout, known)
    except _FieldError as error:
        table.report(line, str(error))
        return
    if key.gfx is None and table.lacks_gfx and "gfx" in layout.key:
        table.report(line, f"there is no gfx, and {key.units} compute units don't determine it")
        return
    if table.lacks_gfx:
        values["gfx"] = key.gfx or ""
    table.rows.append(Row(line, key, us, {name: values[name] for name in layout.tuned if name in values}))


class _FieldError(Exception):
    """The problem with a field, as a sentence."""


def _key(values: dict[str, str]) -> Key:
    units = _whole(values, "cu_num", 1)
    gfx: str | None
    if "gfx" in values:
        gfx = values["gfx"]
        if not _GFX.fullmatch(gfx):
            raise _FieldError(f"gfx is {_short(gfx)}, not an architecture such as gfx942")
    else:
        gfx = GFX_OF_UNITS.get(units)
    dtype, outdtype = values["dtype"], values["outdtype"]
    for name, value in (("dtype", dtype), ("outdtype", outdtype)):
        if value not in DTYPES:
            raise _FieldError(
                f"{name} is {_short(value)}, which aiter never looks up; expected, for example, torch.bfloat16"
            )
    return Key(
        gfx,
        units,
        _whole(values, "M", 1),
        _whole(values, "N", 1),
        _whole(values, "K", 1),
        _flag(values, "bias"),
        dtype,
        outdtype,
        _flag(values, "scaleAB"),
        _flag(values, "bpreshuffle") if "bpreshuffle" in values else False,
    )


def _time_of(values: dict[str, str], layout: Layout, known: frozenset[str]) -> float | None:
    """Check the tuned kernel of a row. Returns its time in µs, or None if the tuner found no kernel."""
    library = values["libtype"]
    if library not in known:
        raise _FieldError(f"libtype is {_short(library)}; this release supports {', '.join(sorted(known))}")
    _whole(values, "solidx", -1)
    if "splitK" in layout.tuned and values["splitK"] not in _EMPTY:
        _whole(values, "splitK", 0)
    if len(values["kernelName"]) > 2000 or not values["kernelName"].isprintable():
        raise _FieldError("kernelName is not the name of a kernel")
    for name in layout.tuned:
        if name in ("err_ratio", "tflops", "bw") and values[name] not in _EMPTY:
            _number(values, name)
    time = _number(values, next(name for name in layout.tuned if RENAMED.get(name, name) == "us"))
    return time if 0 <= time < math.inf else None


def _whole(values: dict[str, str], name: str, least: int) -> int:
    text = values[name]
    if not re.fullmatch(r"-?[0-9]{1,12}", text, re.ASCII) or not least <= int(text) <= _LARGEST:
        raise _FieldError(f"{name} is {_short(text)}, not an integer from {least} to {_LARGEST}")
    return int(text)


def _number(values: dict[str, str], name: str) -> float:
    text = values[name]
    try:
        value = float(text) if len(text) < 40 and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise _FieldError(f"{name} is {_short(text)}, not a number")
    return value


def _flag(values: dict[str, str], name: str) -> bool:
    value = _FLAGS.get(values[name])
    if value is None:
        raise _FieldError(f"{name} is {_short(values[name])}, not True or False")
    return value


def _short(text: str) -> str:
    return "empty" if not text else ascii(text if len(text) <= 40 else f"{text[:40]}…").replace("\\u2026", "…")


def _repeated(table: Table, layout: Layout) -> None:
    """Report and remove rows that differ from an earlier row for the same shape: aiter fails on such a file."""
    first: dict[Key, Row] = {}
    rows, table.rows = table.rows, []
    for row in rows:
        earlier = first.setdefault(row.key.looked_up(layout), row)
        if earlier.values == row.values:
            table.rows.append(row)
        else:
            table.report(row.line, f"the same shape as line {earlier.line}, with another kernel or time")
