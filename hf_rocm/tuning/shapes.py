"""Which products (GEMMs) a model runs, seen from the calls of its linear layers.

A recording is a file in the form of aiter's untuned tables, so that any tuner of theirs takes it too.
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
from torch.overrides import TorchFunctionMode

from hf_rocm.errors import TableError
from hf_rocm.tuning.columns import LAYOUTS, SHAPE, Layout
from hf_rocm.tuning.table import DTYPES, Key, text_of


class Gemm(NamedTuple):
    """[M, K] by [N, K]ᵀ. dtype: of all of it, as `torch.bfloat16`. shuffled: the weight is in aiter's own layout."""

    m: int
    n: int
    k: int
    dtype: str
    bias: bool
    shuffled: bool = False

    def key(self, gfx: str, units: int) -> Key:
        """What aiter looks this product up by on that GPU."""
        return Key(gfx, units, self.m, self.n, self.k, self.bias, self.dtype, self.dtype, False, self.shuffled)


class Recording(TorchFunctionMode):
    """While it is entered, every `F.linear` is noted, from whichever module or library it comes.

    with Recording() as seen, torch.inference_mode():
        model.generate(...)
    seen.shapes()
    """

    def __init__(self) -> None:
        super().__init__()
        # weight → (M, bias) of its calls; the weight is held, so that its id stays its own
        self._seen: dict[int, tuple[Any, dict[tuple[int, bool], None]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def shapes(self, joined: Iterable[tuple[nn.Linear, ...]] = ()) -> list[Gemm]:
        """Every product once, the smallest first. joined: layers that are run as one, where they are fused."""
        left = dict(self._seen)
        found: dict[Gemm, None] = {}
        for group in joined:
            calls = [left.get(id(linear.weight)) for linear in group]
            if None in calls or len({tuple(call[1]) for call in calls if call}) != 1:
                continue  # they don't always run together
            n = sum(linear.weight.shape[0] for linear in group)
            found.update(dict.fromkeys(_gemm(m, n, group[0].weight, bias) for m, bias in calls[0][1]))  # type: ignore[index]
            for linear in group:
                del left[id(linear.weight)]
        for weight, calls_of in left.values():
            found.update(dict.fromkeys(_gemm(m, weight.shape[0], weight, bias) for m, bias in calls_of))
        return sorted(found)

    def _note(self, input: Any, weight: Any, bias: Any = None) -> None:
        if weight.ndim == 2 and input.numel():
            m = input.numel() // input.shape[-1]
            self._seen.setdefault(id(weight), (weight, {}))[1][int(m), bias is not None] = None


def fusable(group: tuple[Any, ...]) -> bool:
    """Whether the loader would fuse these layers into one, as far as their shapes say."""
    return (
        len(group) > 1
        and all(type(each) is nn.Linear for each in group)
        and len({(each.weight.shape[1], each.weight.dtype, each.bias is None) for each in group}) == 1
    )


def fingerprint(model: nn.Module) -> str:
    """The same for a model whether it is loaded, fused, or only built: its linear layers and their dtype."""
    linears = sorted(
        f"{path} {module.out_features}x{module.in_features} {module.weight.dtype} {module.bias is not None}"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, torch.Tensor)
    )
    return "\n".join([type(model).__name__, *linears])


def write(shapes: Iterable[Gemm], layout: Layout = LAYOUTS[-1]) -> str:
    """An untuned table of this layout, as text. A release that knows no shuffled weights gets no such rows."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(layout.untuned)
    for each in shapes:
        row = [each.m, each.n, each.k, each.bias, each.dtype, each.dtype, False]
        if layout.shuffled:
            writer.writerow([*row, each.shuffled])
        elif not each.shuffled:
            writer.writerow(row)
    return out.getvalue()


def read(path: Path) -> list[Gemm]:
    """An untuned table of any release, ours or one that aiter captured. Raises `TableError`, naming lines."""
    lines = csv.reader(io.StringIO(text_of(path), newline=""), strict=True)
    found: dict[Gemm, None] = {}
    try:
        header = [each.strip() for each in next(lines, [])]
        missing = [name for name in SHAPE if name not in header]
        if missing:
            raise _wrong(path, 1, f"there is no column {', '.join(missing)}")
        for fields in lines:
            if any(each.strip() for each in fields):
                found[_read_row(path, lines.line_num, header, fields)] = None
    except csv.Error as error:
        raise _wrong(path, max(1, lines.line_num), f"not CSV: {error}") from error
    if not found:
        raise TableError(f"{path.name} has no shapes", facts={"file": path})
    return sorted(found)


def _read_row(path: Path, line: int, header: list[str], fields: list[str]) -> Gemm:
    values = dict(zip(header, (each.strip() for each in fields), strict=False))
    flags = {"true": True, "false": False}
    bias, shuffled = (flags.get(values.get(name, "False").lower()) for name in ("bias", "bpreshuffle"))
    if len(fields) != len(header):
        raise _wrong(path, line, f"{len(fields)} fields, and the header has {len(header)}")
    numbers = [values[name] for name in ("M", "N", "K")]
    if not all(each.isdecimal() and each.isascii() and 0 < len(each) < 11 and int(each) for each in numbers):
        raise _wrong(path, line, f"M, N and K are {', '.join(ascii(each[:20]) for each in numbers)}, not whole numbers")
    if values["dtype"] not in DTYPES or bias is None or shuffled is None:
        raise _wrong(path, line, "dtype must be such as torch.bfloat16, bias and bpreshuffle True or False")
    m, n, k = map(int, numbers)
    return Gemm(m, n, k, values["dtype"], bias, shuffled)


def _gemm(m: int, n: int, weight: Any, bias: bool) -> Gemm:
    return Gemm(m, n, int(weight.shape[1]), str(weight.dtype), bias)


def _wrong(path: Path, line: int, text: str) -> TableError:
    return TableError(f"{path.name} is not a list of shapes", facts={"file": path, f"line {line}": text})
