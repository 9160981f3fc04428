"""Formats in which checkpoints store quantised layers and experts, and encodings that represent the same numbers.

A format names the tensors of a layer. The large ones of a linear layer become rows of a `QuantizedWeight` and are
recreated from them byte for byte. The small ones are kept unchanged, as are all tensors of experts. No number is
rounded in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_rocm.errors import HfRocmError, OptionError
from hf_rocm.ops.eight_bit import BLOCK, dequantize_blocks, dequantize_rows
from hf_rocm.ops.four_bit import INT4, PER_WORD, run_length
from hf_rocm.ops.four_bit import packed as packed_runs
from hf_rocm.ops.four_bit import unpacked as unpacked_runs
from hf_rocm.weights.eight_bit import EightBitWeight
from hf_rocm.weights.encoding import CHUNK, QuantizedWeight
from hf_rocm.weights.four_bit import FourBitWeight

Tensors = Mapping[str, Tensor]

SCALES = (torch.bfloat16, torch.float16, torch.float32)
# The number that represents 0 in integers without zero points.
_ZERO = 8
# N and K must be multiples of this for the GEMMs.
_MULTIPLE = 16


class Unsupported(HfRocmError):
    """A checkpoint uses a feature that hf_rocm does not support. Stock transformers loads such checkpoints."""


class TensorInfo(NamedTuple):
    """The dtype and the shape of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Expected(NamedTuple):
    """The requirements for one tensor of a layer.

    shapes: the allowed shapes; if empty, any shape is allowed. check: a function of the tensor's values that returns
    an error, or None.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True
    check: Callable[[tuple[Any, ...]], str | None] | None = None


@dataclass(frozen=True)
class StoredFormat:
    """The format of every quantised layer of a checkpoint."""

    # The name of a tensor that every quantised layer has.
    marker: ClassVar[str]
    # The large tensors of a layer.
    bulk: ClassVar[tuple[str, ...]]
    # The tensors that stay parameters in the dtype of the model.
    plain: ClassVar[tuple[str, ...]] = ("bias",)

    @classmethod
    def split(cls, name: str) -> tuple[str, str]:
        """Split a tensor's name in a checkpoint into the name of its layer and its name in the layer."""
        layer, _, tensor = name.rpartition(".")
        return layer, tensor

    def completed(self, tensors: Mapping[str, Any]) -> StoredFormat:
        """The format, completed with parameters that are known only from a quantised layer. Raises `Unsupported`.

        tensors: the tensors of one such layer, as entries of the files' headers.
        """
        return self

    def described(self) -> str:
        """The format as text for a report."""
        raise NotImplementedError

    def expected(self, *sizes: Any, **named: Any) -> dict[str, Expected]:
        """The tensors of a layer by name, without an optional bias. sizes: the result of `StoredLayer.sizes`."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearFormat(StoredFormat):
    """A format of linear layers [N, K] whose `bulk` tensors are replaced with an encoded weight."""

    def refuses(self, n: int, k: int) -> str | None:
        """The reason why a weight [N, K] can't be encoded and is dequantised in every call, or None."""
        if n % _MULTIPLE or k % _MULTIPLE:
            return f"its sizes {n} × {k} are not multiples of {_MULTIPLE}"
        return None

    def joins(self, first: Tensors, other: Tensors) -> bool:
        """Whether layers with these tensors and the same K can share one encoded weight."""
        return all(first[name].dtype == other[name].dtype for name in self.bulk if name in first)

    def empty(self, n: int, k: int, layers: Sequence[Tensors], bias: Tensor | None) -> QuantizedWeight:
        """An uninitialised encoded weight with n rows, for layers with these tensors."""
        raise NotImplementedError

    def put(self, weight: QuantizedWeight, start: int, tensors: Tensors) -> None:
        """Write a layer's tensors into the rows that begin at `start`."""
        raise NotImplementedError

    def get(self, weight: QuantizedWeight, start: int, n: int, name: str, info: TensorInfo) -> Tensor:
        """One of the `bulk` tensors, recreated from n rows as a new tensor on the weight's device."""
        raise NotImplementedError

    def read(self, tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
        """The dequantised weight [N, K]."""
        raise NotImplementedError


@dataclass(frozen=True)
class EightBitFormat(LinearFormat):
    """`weight`: [N, K] int8 or fp8; `marker` is the name of the scale.

    scale_for: `row`, `tensor`, or `block` of 128 × 128. weight_only: whether x is never rounded, as is the case for
    blocks.
    """

    bulk = ("weight",)
    # The shapes of a single number.
    one: ClassVar[tuple[tuple[int, ...], ...]] = ((1,), ())
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = SCALES
    library: str
    format: torch.dtype
    scale_for: str
    weight_only: bool

    def described(self) -> str:
        name = str(self.format).removeprefix("torch.")
        return f"{name}, a scale for each {self.scale_for} ({self.library})"

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        scales = {"row": ((n, 1), (n,)), "tensor": (*self.one, (1, 1)), "block": (_blocks(n, k),)}
        return {
            "weight": Expected((self.format,), ((n, k),)),
            self.marker: Expected(self.scale_dtypes, scales[self.scale_for]),
        }

    def joins(self, first: Tensors, other: Tensors) -> bool:
        whole = self.scale_for != "block" or len(first["weight"]) % BLOCK == len(other["weight"]) % BLOCK == 0
        return super().joins(first, other) and whole

    def empty(self, n: int, k: int, layers: Sequence[Tensors], bias: Tensor | None) -> QuantizedWeight:
        device = layers[0]["weight"].device
        data = torch.empty((n, k), dtype=self.format, device=device)
        scale = torch.empty(_blocks(n, k) if self.scale_for == "block" else n, dtype=torch.float32, device=device)
        return EightBitWeight(data, scale, bias, weight_only=self.weight_only)

    def put(self, weight: Any, start: int, tensors: Tensors) -> None:
        data = tensors["weight"].to(weight.data.device)
        weight.put(start, data)
        scales = weight.scales_of(start, start + len(data))
        weight.scale[scales] = self._numbers(tensors)

    def _numbers(self, tensors: Tensors) -> Tensor:
        """The scales in fp32: [N], [1], or one per block."""
        scale = tensors[self.marker].float()
        return scale if self.scale_for == "block" else scale.flatten()

    def get(self, weight: Any, start: int, n: int, name: str, info: TensorInfo) -> Tensor:
        rows: Tensor = weight.rows(start, start + n)
        return rows.clone() if rows.dtype == info.dtype else rows.float().to(info.dtype)

    def read(self, tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
        data, scale = tensors["weight"], self._numbers(tensors)
        if self.scale_for == "block":
            return dequantize_blocks(data, scale, dtype)
        return dequantize_rows(data, scale.expand(n), dtype)


def _blocks(n: int, k: int) -> tuple[int, int]:
    return -(-n // BLOCK), -(-k // BLOCK)


@dataclass(frozen=True)
class FourBitFormat(LinearFormat):
    """4-bit numbers with one scale per group of `group` numbers in a row, or per row if `group` is -1."""

    # The name of the scales.
    scales: ClassVar[str]
    # The name of the zero points, which may be absent.
    zero_points: ClassVar[str]
    # Tensors that must be equal in layers that are joined.
    shared: ClassVar[tuple[str, ...]] = ()
    library: str
    group: int

    def described(self) -> str:
        groups = "a scale for each row" if self.group == -1 else f"groups of {self.group}"
        return f"4 bits, {groups} ({self.library})"

    def groups(self, k: int) -> int:
        """The number of groups in a row of K numbers. The last group may be smaller than the others."""
        return 1 if self.group == -1 else -(-k // self.group)

    def zeros(self, tensors: Tensors, n: int) -> Tensor | None:
        """The zero points, the numbers that represent 0: [N, groups] uint8, or None if there are none."""
        raise NotImplementedError

    def from_zeros(self, zeros: Tensor) -> Tensor:
        """The inverse of `zeros`: return the layer's tensor. zeros: the zero points, [N, groups] int32."""
        raise NotImplementedError

    def group_of(self, tensors: Tensors, k: int, device: torch.device) -> Tensor:
        """The group of every input, [K]."""
        return torch.arange(k, device=device) // (k if self.group == -1 else self.group)

    def order(self, tensors: Tensors, k: int) -> Tensor | None:
        """The indices that sort the inputs by group, [K], or None if they are sorted."""
        groups = self.group_of(tensors, k, tensors[self.scales].device)
        return None if bool((groups[1:] >= groups[:-1]).all()) else groups.argsort(stable=True).to(torch.int32)

    def levels(self, tensors: Tensors, start: int, stop: int, k: int) -> Tensor:
        """The numbers 0 … 15 of some rows, [rows, K] int32. In integers without zero points, 8 represents 0."""
        raise NotImplementedError

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        """The inverse of `levels`: write the numbers of the rows that begin at `start` into the layer's tensor."""
        raise NotImplementedError

    def to_rows(self, scales: Tensor, k: int) -> Tensor:
        """The scales of a weight [N, K] as [N, groups], from the layer's tensor."""
        return scales

    def from_rows(self, scales: Tensor) -> Tensor:
        """The inverse of `to_rows`."""
        return scales

    def refuses(self, n: int, k: int) -> str | None:
        group = k if self.group == -1 else self.group
        if k % group:
            return f"its number of inputs, {k}, is not a multiple of the group size {group}"
        return super().refuses(n, k)

    def joins(self, first: Tensors, other: Tensors) -> bool:
        return super().joins(first, other) and all(
            torch.equal(first[name], other[name]) for name in self.shared if name in first and name in other
        )

    def empty(self, n: int, k: int, layers: Sequence[Tensors], bias: Tensor | None) -> QuantizedWeight:
        scale = layers[0][self.scales]
        words = torch.empty((n, k // PER_WORD), dtype=INT4, device=scale.device)
        scales = scale.new_empty((n, self.groups(k)))
        return FourBitWeight(words, scales, bias, order=self.order(layers[0], k))

    def put(self, weight: Any, start: int, tensors: Tensors) -> None:
        k, device = weight.data.shape[1] * PER_WORD, weight.data.device
        scale = self.to_rows(tensors[self.scales], k)
        n = len(scale)
        order, zeros = self.order(tensors, k), self.zeros(tensors, n)
        if not _same(order, weight.order):
            raise OptionError(
                "the inputs of a quantised layer are in a different order from those of the other layers of its group"
            )
        if zeros is not None and weight.zeros is None and bool((zeros != _ZERO).any()):
            weight.zeros = torch.full(weight.scale.shape, _ZERO, dtype=torch.uint8, device=device)
        if weight.zeros is not None:
            weight.zeros[start : start + n] = _ZERO if zeros is None else zeros
        weight.scale[start : start + n] = scale
        run = run_length(k, k // scale.shape[1])
        for first, last in _pieces(n, k):
            levels = self.levels(tensors, first, last, k).to(device)
            levels = levels if order is None else levels[:, order.to(device)]
            weight.data[start + first : start + last] = packed_runs(levels, run)

    def get(self, weight: Any, start: int, n: int, name: str, info: TensorInfo) -> Tensor:
        scale: Tensor = weight.scale[start : start + n]
        if name == self.scales:
            return self.from_rows(scale).clone(memory_format=torch.contiguous_format)
        if name == self.zero_points:
            zeros = torch.full_like(scale, _ZERO) if weight.zeros is None else weight.zeros[start : start + n]
            return self.from_zeros(zeros.to(torch.int32)).contiguous()
        k = weight.data.shape[1] * PER_WORD
        run = run_length(k, k // scale.shape[1])
        out = torch.empty(info.shape, dtype=info.dtype, device=weight.data.device)
        back = None if weight.order is None else weight.order.argsort()
        for first, last in _pieces(n, k):
            levels = unpacked_runs(weight.data[start + first : start + last], run)
            self.put_levels(out, first, levels if back is None else levels[:, back])
        return out

    def read(self, tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        scale = self.to_rows(tensors[self.scales], k)
        zeros, index = self.zeros(tensors, n), self.group_of(tensors, k, scale.device)
        out = torch.empty((n, k), dtype=dtype, device=scale.device)
        for first, last in _pieces(n, k):
            levels = self.levels(tensors, first, last, k).to(wide)
            levels -= _ZERO if zeros is None else zeros[first:last].to(wide)[:, index]
            out[first:last] = (levels * scale[first:last].to(wide)[:, index]).to(dtype)
        return out


def unpack(words: Tensor, shifts: Sequence[int]) -> Tensor:
    """The eight numbers of every word, [..., 8]. shifts: their bit offsets."""
    return (words.unsqueeze(-1) >> torch.tensor(shifts, dtype=words.dtype, device=words.device)) & 0xF


def pack(numbers: Tensor, shifts: Sequence[int]) -> Tensor:
    """The inverse of `unpack`."""
    words = numbers[..., 0] << shifts[0]
    for index, shift in enumerate(shifts[1:], 1):
        words |= numbers[..., index] << shift
    return words


IN_ORDER = tuple(range(0, 4 * PER_WORD, 4))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.to(other.device), other)


def _pieces(n: int, k: int) -> list[tuple[int, int]]:
    """The ranges of rows that are converted at once. Layouts that pack rows require multiples of 8."""
    step = max(8, CHUNK // k // 8 * 8)
    return [(first, min(n, first + step)) for first in range(0, n, step)]


def only_known(settings: Mapping[str, Any], known: tuple[str, ...], section: str) -> None:
    """Raise `Unsupported` if a setting that is not in `known` is truthy.

    section: the part of the checkpoint that the settings belong to, for the message.
    """
    other = next((name for name, value in settings.items() if value and name not in known), None)
    if other is not None:
        raise Unsupported(f"the setting {other!r} of the {section} is not supported")


Parser = Callable[[Mapping[str, Any]], StoredFormat]
ParserT = TypeVar("ParserT", bound=Parser)

_parsers: dict[str, Parser] = {}


def stored_format(method: str) -> Callable[[ParserT], ParserT]:
    """Register the parser of the `quantization_config` of one `quant_method`. The parser may raise `Unsupported`."""

    def register_it(parser: ParserT) -> ParserT:
        _parsers[method] = parser
        return parser

    return register_it


def parsers() -> dict[str, Parser]:
    """The parsers of all imported modules, by `quant_method`."""
    return dict(_parsers)
