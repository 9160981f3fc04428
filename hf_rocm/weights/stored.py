"""How checkpoints store the weight of a quantised linear layer, and the encodings that take the same numbers.

A format names the tensors of a layer. The large ones become rows of a `QuantizedWeight` and are recreated from them
byte for byte; the small ones are kept as they are. No number is rounded in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_rocm.errors import HfRocmError
from hf_rocm.ops.eight_bit import FP8, INT8, dequantize_rows
from hf_rocm.ops.four_bit import INT4, PER_WORD, run_length
from hf_rocm.ops.four_bit import packed as packed_runs
from hf_rocm.ops.four_bit import unpacked as unpacked_runs
from hf_rocm.weights.eight_bit import EightBitWeight
from hf_rocm.weights.encoding import CHUNK, QuantizedWeight
from hf_rocm.weights.four_bit import FourBitWeight

Tensors = Mapping[str, Tensor]

SCALES = (torch.bfloat16, torch.float16, torch.float32)
_MULTIPLE = 16  # of N and K: the requirement of the products


class Unsupported(HfRocmError):
    """A checkpoint uses a feature that has no kernel here: stock loads it."""


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Expected(NamedTuple):
    """What a layer's tensor must look like. value: its contents, if they are known before loading."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True
    value: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StoredFormat:
    """The format of every quantised layer of a checkpoint."""

    marker: ClassVar[str]  # every quantised layer has a tensor of this name
    bulk: ClassVar[tuple[str, ...]]  # the tensors that the encoded weight replaces

    def described(self) -> str:
        """The format in a report."""
        raise NotImplementedError

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        """The tensors of a layer [N, K] by name, without the bias."""
        raise NotImplementedError

    def refuses(self, n: int, k: int) -> str | None:
        """Why the weight [N, K] can't be encoded for our kernels, or None; the layer then multiplies it dequantised."""
        if n % _MULTIPLE or k % _MULTIPLE:
            return f"its sizes {n} × {k} are not multiples of {_MULTIPLE}"
        return None

    def joins(self, first: Tensors, other: Tensors) -> bool:
        """Whether layers with these tensors and the same K can share one encoded weight."""
        return all(first[name].dtype == other[name].dtype for name in self.bulk)

    def empty(self, n: int, k: int, tensors: Tensors, bias: Tensor | None) -> QuantizedWeight:
        """An encoded weight with n rows that is still to be written, for layers with tensors such as these."""
        raise NotImplementedError

    def put(self, weight: QuantizedWeight, start: int, tensors: Tensors) -> None:
        """Write a layer's tensors into the rows from start on."""
        raise NotImplementedError

    def get(self, weight: QuantizedWeight, start: int, n: int, name: str, info: TensorInfo) -> Tensor:
        """One of the `bulk` tensors, recreated from n rows: a new tensor on the device of the weight."""
        raise NotImplementedError

    def read(self, tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
        """The dequantised weight [N, K]."""
        raise NotImplementedError


@dataclass(frozen=True)
class EightBitFormat(StoredFormat):
    """`weight`: [N, K] int8 or fp8; `weight_scale`: one for the tensor or one for each row.

    weight_only: x is not rounded in any product.
    """

    marker = "weight_scale"
    bulk = ("weight",)
    library: str
    format: torch.dtype
    per_row: bool
    weight_only: bool

    def described(self) -> str:
        name = str(self.format).removeprefix("torch.")
        return f"{name}, a scale for each {'row' if self.per_row else 'tensor'} ({self.library})"

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        scales: tuple[tuple[int, ...], ...] = ((n, 1), (n,)) if self.per_row else ((1,), (), (1, 1))
        one: tuple[tuple[int, ...], ...] = ((1,), ())
        return {
            "weight": Expected((self.format,), ((n, k),)),
            "weight_scale": Expected(SCALES, scales),
            # of activations: no product here rounds them with these, but they are saved again
            "input_scale": Expected(SCALES, one, required=False),
            "input_zero_point": Expected((INT8, FP8, torch.int32, *SCALES), one, required=False),
        }

    def empty(self, n: int, k: int, tensors: Tensors, bias: Tensor | None) -> QuantizedWeight:
        device = tensors["weight"].device
        data = torch.empty((n, k), dtype=self.format, device=device)
        scale = torch.empty(n, dtype=torch.float32, device=device)
        return EightBitWeight(data, scale, bias, weight_only=self.weight_only)

    def put(self, weight: Any, start: int, tensors: Tensors) -> None:
        data = tensors["weight"].to(weight.data.device)
        weight.put(start, data)
        weight.scale[start : start + len(data)] = tensors["weight_scale"].flatten().float()

    def get(self, weight: Any, start: int, n: int, name: str, info: TensorInfo) -> Tensor:
        rows: Tensor = weight.rows(start, start + n)
        return rows.clone()

    def read(self, tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return dequantize_rows(tensors["weight"], tensors["weight_scale"].flatten().float().expand(n), dtype)


@dataclass(frozen=True)
class FourBitFormat(StoredFormat):
    """4-bit integers with a scale for each group of `group` numbers of a row; -1: for the whole row."""

    scales: ClassVar[str]  # the name of the scales
    library: str
    group: int

    def described(self) -> str:
        groups = "a scale for each row" if self.group == -1 else f"groups of {self.group}"
        return f"4 bits, {groups} ({self.library})"

    def groups(self, k: int) -> int:
        """How many groups a row of K numbers has."""
        return 1 if self.group == -1 else k // self.group

    def levels(self, tensors: Tensors, start: int, stop: int, k: int) -> Tensor:
        """The numbers 0 … 15 of some rows, [rows, K] int32; 8 stands for 0."""
        raise NotImplementedError

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        """The inverse: write the numbers of rows from start on into the layer's tensor."""
        raise NotImplementedError

    def to_rows(self, scales: Tensor) -> Tensor:
        """The scales as [N, groups]."""
        return scales

    def from_rows(self, scales: Tensor) -> Tensor:
        """The inverse."""
        return scales

    def refuses(self, n: int, k: int) -> str | None:
        group = k if self.group == -1 else self.group
        if k % group:
            return f"its {k} inputs are not a multiple of the group size {group}"
        return super().refuses(n, k)

    def joins(self, first: Tensors, other: Tensors) -> bool:
        return super().joins(first, other) and first[self.scales].device == other[self.scales].device

    def empty(self, n: int, k: int, tensors: Tensors, bias: Tensor | None) -> QuantizedWeight:
        scale = tensors[self.scales]
        words = torch.empty((n, k // PER_WORD), dtype=INT4, device=scale.device)
        return FourBitWeight(words, scale.new_empty((n, self.groups(k))), bias)

    def put(self, weight: QuantizedWeight, start: int, tensors: Tensors) -> None:
        scale = self.to_rows(tensors[self.scales])
        n, k = len(scale), weight.data.shape[1] * PER_WORD
        weight.scale[start : start + n] = scale
        run = run_length(k, k // scale.shape[1])
        for first, last in _pieces(n, k):
            levels = self.levels(tensors, first, last, k)
            weight.data[start + first : start + last] = packed_runs(levels.to(weight.data.device), run)

    def get(self, weight: QuantizedWeight, start: int, n: int, name: str, info: TensorInfo) -> Tensor:
        scale = weight.scale[start : start + n]
        if name == self.scales:
            return self.from_rows(scale).clone(memory_format=torch.contiguous_format)
        k = weight.data.shape[1] * PER_WORD
        run = run_length(k, k // scale.shape[1])
        out = torch.empty(info.shape, dtype=info.dtype, device=weight.data.device)
        for first, last in _pieces(n, k):
            self.put_levels(out, first, unpacked_runs(weight.data[start + first : start + last], run))
        return out

    def read(self, tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        scale = self.to_rows(tensors[self.scales])
        index = torch.arange(k, device=scale.device) // (k if self.group == -1 else self.group)
        out = torch.empty((n, k), dtype=dtype, device=scale.device)
        for first, last in _pieces(n, k):
            levels = self.levels(tensors, first, last, k).to(wide) - 8
            out[first:last] = (levels * scale[first:last].to(wide)[:, index]).to(dtype)
        return out


def _pieces(n: int, k: int) -> list[tuple[int, int]]:
    """Rows that are converted at once: a multiple of 8, which layouts that pack rows require."""
    step = max(8, CHUNK // k // 8 * 8)
    return [(first, min(n, first + step)) for first in range(0, n, step)]


Parser = Callable[[Mapping[str, Any]], StoredFormat]
ParserT = TypeVar("ParserT", bound=Parser)

_parsers: dict[str, Parser] = {}


def stored_format(method: str) -> Callable[[ParserT], ParserT]:
    """Register the reader of the `quantization_config` of one `quant_method`. It raises `Unsupported`."""

    def register_it(parser: ParserT) -> ParserT:
        _parsers[method] = parser
        return parser

    return register_it


def parsers() -> dict[str, Parser]:
    """The imported readers by `quant_method`."""
    return dict(_parsers)
