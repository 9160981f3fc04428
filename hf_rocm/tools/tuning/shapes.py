"""The GEMMs that a model runs, recorded from the calls of its linear layers.

Recordings are files in the format of aiter's untuned tables, so that aiter's tuners can read them too.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import Linear
from torch.overrides import TorchFunctionMode

from hf_rocm.errors import TableError
from hf_rocm.ops.aiter.tables.columns import LAYOUTS, SHAPE, Layout
from hf_rocm.ops.aiter.tables.table import DTYPES, Key, text_of


class Gemm(NamedTuple):
    """[M, K] times [N, K]ᵀ. dtype: the dtype of the inputs and the output, such as `torch.bfloat16`. shuffled: whether
    the weight is in aiter's layout."""

    m: int
    n: int
    k: int
    dtype: str
    bias: bool
    shuffled: bool = False

    def key(self, gfx: str, units: int) -> Key:
        """Return aiter's key for this GEMM on that GPU."""
        return Key(gfx, units, self.m, self.n, self.k, self.bias, self.dtype, self.dtype, False, self.shuffled)


class Recording(TorchFunctionMode):
    """A context manager that records every call to `F.linear`, including those in other modules and libraries.

    with Recording() as recording, torch.inference_mode():
        model.generate(...)
    recording.shapes()
    """

    def __init__(self) -> None:
        super().__init__()
        # id of a weight → the weight and (M, bias) of its calls; the reference to the weight keeps the id unique
        self._seen: dict[int, tuple[Any, dict[tuple[int, bool], None]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def shapes(self, fused_groups: Iterable[tuple[Linear, ...]] = ()) -> list[Gemm]:
        """Return every GEMM once, in ascending order. fused_groups: groups of layers that are fused."""
        remaining = dict(self._seen)
        gemms: dict[Gemm, None] = {}
        for group in fused_groups:
            calls = [remaining.get(id(linear.weight)) for linear in group]
            if None in calls or len({tuple(call[1]) for call in calls if call}) != 1:
                # The layers are not always called together.
                continue
            n = sum(linear.weight.shape[0] for linear in group)
            gemms.update(dict.fromkeys(_gemm(m, n, group[0].weight, bias) for m, bias in calls[0][1]))  # type: ignore[index]
            for linear in group:
                del remaining[id(linear.weight)]
        for weight, calls_of in remaining.values():
            gemms.update(dict.fromkeys(_gemm(m, weight.shape[0], weight, bias) for m, bias in calls_of))
        return sorted(gemms)

    def _note(self, input: Any, weight: Any, bias: Any = None) -> None:
        if weight.ndim == 2 and input.numel():
            m = input.numel() // input.shape[-1]
            self._seen.setdefault(id(weight), (weight, {}))[1][int(m), bias is not None] = None


def fusable(group: tuple[Any, ...]) -> bool:
    """Return whether the loader can fuse these layers, given their types, shapes, dtypes and biases."""
    return (
        len(group) > 1
        and all(type(layer) is Linear for layer in group)
        and len({(layer.weight.shape[1], layer.weight.dtype, layer.bias is None) for layer in group}) == 1
    )


def fingerprint(model: nn.Module) -> str:
    """Return text that identifies the linear layers and their dtypes. Loading and fusing do not change it."""
    linears = sorted(
        f"{path} {module.out_features}x{module.in_features} {module.weight.dtype} {module.bias is not None}"
        for path, module in model.named_modules()
        if isinstance(module, Linear) and isinstance(module.weight, torch.Tensor)
    )
    return "\n".join([type(model).__name__, *linears])


def write(shapes: Iterable[Gemm], layout: Layout = LAYOUTS[-1]) -> str:
    """Return the text of an untuned table in this layout, without shuffled GEMMs if it has no column for them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(layout.untuned)
    for shape in shapes:
        row = [shape.m, shape.n, shape.k, shape.bias, shape.dtype, shape.dtype, False]
        if layout.shuffled:
            writer.writerow([*row, shape.shuffled])
        elif not shape.shuffled:
            writer.writerow(row)
    return out.getvalue()


def read(path: Path) -> list[Gemm]:
    """Read an untuned table from any release of hf_rocm or aiter.

    Raises `TableError`, with the line number if a line is invalid.
    """
    lines = csv.reader(io.StringIO(text_of(path), newline=""), strict=True)
    gemms: dict[Gemm, None] = {}
    try:
        header = [column.strip() for column in next(lines, [])]
        missing = [name for name in SHAPE if name not in header]
        if missing:
            raise _table_error(path, 1, f"missing column{'s' * (len(missing) > 1)}: {', '.join(missing)}")
        for fields in lines:
            if any(field.strip() for field in fields):
                gemms[_read_row(path, lines.line_num, header, fields)] = None
    except csv.Error as error:
        raise _table_error(path, max(1, lines.line_num), f"not CSV: {error}") from error
    if not gemms:
        raise TableError(f"{path.name} has no shapes", facts={"file": path})
    return sorted(gemms)


def _read_row(path: Path, line: int, header: list[str], fields: list[str]) -> Gemm:
    values = dict(zip(header, (field.strip() for field in fields), strict=False))
    flags = {"true": True, "false": False}
    bias, shuffled = (flags.get(values.get(name, "False").lower()) for name in ("bias", "bpreshuffle"))
    if len(fields) != len(header):
        raise _table_error(path, line, f"expected {len(header)} fields, as in the header, got {len(fields)}")
    numbers = [values[name] for name in ("M", "N", "K")]
    if not all(number.isdecimal() and number.isascii() and 0 < len(number) < 11 and int(number) for number in numbers):
        values_read = ", ".join(ascii(number[:20]) for number in numbers)
        raise _table_error(path, line, f"M, N and K must be positive integers of at most 10 digits, got {values_read}")
    if values["dtype"] not in DTYPES or bias is None or shuffled is None:
        raise _table_error(
            path, line, "dtype must be a name such as torch.bfloat16, and bias and bpreshuffle True or False"
        )
    m, n, k = map(int, numbers)
    return Gemm(m, n, k, values["dtype"], bias, shuffled)


def _gemm(m: int, n: int, weight: Any, bias: bool) -> Gemm:
    return Gemm(m, n, int(weight.shape[1]), str(weight.dtype), bias)


def _table_error(path: Path, line: int, text: str) -> TableError:
    return TableError(f"{path.name} is not a list of shapes", facts={"file": path, f"line {line}": text})
