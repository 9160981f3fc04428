"""Checkpoints of AWQ (in its GEMM order) and GPTQ: 4-bit integers with zero points, stored transposed.

AWQ packs eight outputs into a word, the even ones first. GPTQ packs eight inputs into a word, in order. `g_idx`
contains the group of every input: if inputs are sorted by activation (`desc_act`), a group's inputs are not contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.four_bit import PER_WORD
from hf_rocm.weights.stored import (
    IN_ORDER,
    SCALES,
    Expected,
    FourBitFormat,
    StoredFormat,
    Tensors,
    Unsupported,
    pack,
    stored_format,
    unpack,
)

_GROUPS = (32, 64, 128, -1)
# The bit offsets of outputs 0, 1, … in a word.
_EVEN_FIRST = (0, 16, 4, 20, 8, 24, 12, 28)


@dataclass(frozen=True)
class _Transposed(FourBitFormat):
    """`scales`: [K / group, N]; `qzeros`: [K / group, N / 8] int32."""

    marker = "qweight"
    bulk = ("qweight", "scales", "qzeros")
    scales, zero_points = "scales", "qzeros"

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        return {
            "qzeros": Expected((torch.int32,), ((self.groups(k), -(-n // PER_WORD)),)),
            "scales": Expected(SCALES, ((self.groups(k), n),)),
        }

    def to_rows(self, scales: Tensor, k: int) -> Tensor:
        return scales.t()

    def from_rows(self, scales: Tensor) -> Tensor:
        return scales.t()


@dataclass(frozen=True)
class Awq(_Transposed):
    """`qweight`: [K, N / 8] int32."""

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        return {"qweight": Expected((torch.int32,), ((k, -(-n // PER_WORD)),)), **super().expected(n, k)}

    def zeros(self, tensors: Tensors, n: int) -> Tensor | None:
        return unpack(tensors["qzeros"], _EVEN_FIRST).flatten(1)[:, :n].t().to(torch.uint8)

    def from_zeros(self, zeros: Tensor) -> Tensor:
        return pack(zeros.t().unflatten(1, (-1, PER_WORD)), _EVEN_FIRST)

    def levels(self, tensors: Tensors, start: int, stop: int, k: int) -> Tensor:
        words = tensors["qweight"][:, start // PER_WORD : -(-stop // PER_WORD)]
        return unpack(words, _EVEN_FIRST).flatten(1)[:, : stop - start].t()

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        first = start // PER_WORD
        words = pack(levels.t().unflatten(1, (-1, PER_WORD)), _EVEN_FIRST)
        out[:, first : first + words.shape[1]] = words


@dataclass(frozen=True)
class Gptq(_Transposed):
    """`qweight`: [K / 8, N] int32; `g_idx`: [K], the group of every input, optional.

    one_less: whether the stored zero points are one too small.
    """

    shared = ("g_idx",)
    one_less: bool

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        group = k if self.group == -1 else self.group

        def check(values: tuple[int, ...]) -> str | None:
            whole = sorted(values) == [index // group for index in range(k)]
            return None if whole else f"groups that do not have {group} inputs"

        return {
            "qweight": Expected((torch.int32,), ((-(-k // PER_WORD), n),)),
            "g_idx": Expected((torch.int32, torch.int64), ((k,),), required=False, check=check),
            **super().expected(n, k),
        }

    def zeros(self, tensors: Tensors, n: int) -> Tensor | None:
        return (unpack(tensors["qzeros"], IN_ORDER).flatten(1)[:, :n].t() + self.one_less).to(torch.uint8)

    def from_zeros(self, zeros: Tensor) -> Tensor:
        return pack((zeros - int(self.one_less)).t().unflatten(1, (-1, PER_WORD)), IN_ORDER)

    def group_of(self, tensors: Tensors, k: int, device: torch.device) -> Tensor:
        groups = tensors.get("g_idx")
        return super().group_of(tensors, k, device) if groups is None else groups.to(device, torch.int64)

    def levels(self, tensors: Tensors, start: int, stop: int, k: int) -> Tensor:
        return unpack(tensors["qweight"][:, start:stop].t(), IN_ORDER).flatten(1)[:, :k]

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        out[:, start : start + len(levels)] = pack(levels.unflatten(1, (-1, PER_WORD)), IN_ORDER).t()


@stored_format("awq")
def awq(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of the quantised layers. Raises `Unsupported` for anything that is not known to be correct."""
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise Unsupported(f"its AWQ version is {version!r}, but only 'gemm' is supported")
    if config.get("zero_point") is False:
        raise Unsupported("it was quantised by AWQ without zero points")
    return Awq("AWQ", _group(config))


@stored_format("gptq")
def gptq(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of the quantised layers. Raises `Unsupported` for anything that is not known to be correct."""
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise Unsupported(f"its GPTQ checkpoint_format is {version!r}")
    if config.get("is_marlin_format"):
        raise Unsupported("its GPTQ weights have Marlin's layout")
    if config.get("dynamic"):
        raise Unsupported("its layers have several schemes (dynamic)")
    return Gptq("GPTQ", _group(config), version == "gptq")


def _group(config: Mapping[str, Any]) -> int:
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if bits != 4:
        raise Unsupported(f"its weights have {bits} bits, but only 4 bits are supported in this format")
    if group not in _GROUPS:
        raise Unsupported(f"its group size is {group}")
    return int(group)
