"""4-bit checkpoints of bitsandbytes, nf4 and fp4, as transformers' integration writes them.

`weight` has two numbers per byte in the order of the flattened weight, the first in the high bits. Every block of
numbers has a scale, `absmax`. Double quantisation stores the scales in 8 bits, with one factor per 256 scales and one
offset per layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_rocm.errors import OptionError
from hf_rocm.ops.four_bit import CODES, INT4, PER_FACTOR, PER_WORD, Nested, table
from hf_rocm.weights.encoding import QuantizedWeight
from hf_rocm.weights.four_bit import FourBitWeight
from hf_rocm.weights.stored import (
    Expected,
    FourBitFormat,
    StoredFormat,
    Unsupported,
    only_known,
    stored_format,
)

_SETTINGS = (
    "_load_in_4bit",
    "load_in_4bit",
    "quant_method",
    # Ignored, because GEMMs accumulate in fp32.
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type",
    "bnb_4bit_quant_storage",
    # Ignored, because the tensors show whether the scales are quantised.
    "bnb_4bit_use_double_quant",
    # Ignored: the tensors show which layers are quantised, and the rest affects only 8-bit weights or offloading.
    "llm_int8_threshold",
    "llm_int8_skip_modules",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
)
# The smallest number of elements per block that kernels support.
_SMALLEST = 16

_ABSMAX, _MAP = "weight.absmax", "weight.quant_map"
_NESTED_ABSMAX, _NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
_STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True)
class Bitsandbytes(FourBitFormat):
    """The format for one code, a table of 16 numbers. The state of a layer is JSON in a uint8 tensor.

    code: `nf4` or `fp4`. double: whether `absmax` is quantised. `completed` sets group and double.
    """

    marker = _ABSMAX
    bulk = ("weight", _ABSMAX)
    scales, zero_points = _ABSMAX, ""
    shared: ClassVar[tuple[str, ...]] = (_NESTED_MAP,)
    code: str
    double: bool

    @property
    def _state(self) -> str:
        return _STATE + self.code

    @classmethod
    def split(cls, name: str) -> tuple[str, str]:
        layer, inner, tensor = name.rpartition(".weight.")
        return (layer, inner[1:] + tensor) if inner else super().split(name)

    def completed(self, tensors: Mapping[str, Any]) -> Bitsandbytes:
        if self._state not in tensors:
            raise Unsupported(f"its layers have no tensor {self._state}")
        state = _parsed(tensors[self._state].values())
        size = state.get("blocksize")
        if not isinstance(size, int) or size < _SMALLEST or size & (size - 1):
            raise Unsupported(f"its block size is {size!r}")
        if state.get("nested_blocksize", PER_FACTOR) != PER_FACTOR:
            raise Unsupported(f"its scales are quantised in blocks of {state['nested_blocksize']!r}")
        if state.get("nested_dtype", "float32") != "float32":
            raise Unsupported(f"its quantised scales are {state['nested_dtype']!r}")
        return replace(self, group=size, double="nested_blocksize" in state)

    def described(self) -> str:
        return f"{self.code}, groups of {self.group}{', double quantisation' * self.double} ({self.library})"

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        count = -(-n * k // self.group)

        def state_check(values: Sequence[Any]) -> str | None:
            state = _parsed(values)
            wanted = {"quant_type": self.code, "blocksize": self.group, "shape": [n, k]}
            if self.double:
                wanted |= {"nested_blocksize": PER_FACTOR, "nested_dtype": "float32"}
                if not isinstance(state.get("nested_offset"), float):
                    return "no nested_offset"
            return next((f"{name} {state.get(name)!r}" for name in wanted if state.get(name) != wanted[name]), None)

        def map_check(values: Sequence[Any]) -> str | None:
            return None if tuple(values) == CODES[self.code] else f"numbers that differ from those of {self.code}"

        tensors = {
            "weight": Expected((torch.uint8,), ((-(-n * k // 2), 1),)),
            _ABSMAX: Expected((torch.uint8 if self.double else torch.float32,), ((count,),)),
            _MAP: Expected((torch.float32,), ((len(CODES[self.code]),),), check=map_check),
            self._state: Expected((torch.uint8,), (), check=state_check),
        }
        if self.double:
            tensors[_NESTED_ABSMAX] = Expected((torch.float32,), ((-(-count // PER_FACTOR),),))
            tensors[_NESTED_MAP] = Expected((torch.float32,), ((256,),))
        return tensors

    def joins(self, first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
        # the scales of every layer must begin with a new factor
        whole = not self.double or first[_ABSMAX].numel() % PER_FACTOR == other[_ABSMAX].numel() % PER_FACTOR == 0
        return whole and super().joins(first, other)

    def zeros(self, tensors: Mapping[str, Tensor], n: int) -> Tensor | None:
        return None

    def order(self, tensors: Mapping[str, Tensor], k: int) -> Tensor | None:
        return None

    def levels(self, tensors: Mapping[str, Tensor], start: int, stop: int, k: int) -> Tensor:
        return _unpacked(tensors["weight"].view(-1, k // 2)[start:stop])

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        high, low = levels.unflatten(1, (-1, 2)).to(torch.uint8).unbind(-1)
        out.view(-1, high.shape[1])[start : start + len(high)] = (high << 4) | low

    def to_rows(self, scales: Tensor, k: int) -> Tensor:
        return scales.view(-1, self.groups(k))

    def from_rows(self, scales: Tensor) -> Tensor:
        return scales.flatten()

    def empty(self, n: int, k: int, layers: Sequence[Mapping[str, Tensor]], bias: Tensor | None) -> QuantizedWeight:
        scale, groups, nested = layers[0][_ABSMAX], self.groups(k), None
        if self.double:
            factors = torch.empty((-(-n * groups // PER_FACTOR), 2), device=scale.device)
            nested = Nested(layers[0][_NESTED_MAP].to(scale.device), factors)
        words = torch.empty((n, k // PER_WORD), dtype=INT4, device=scale.device)
        return FourBitWeight(words, scale.new_empty((n, groups)), bias, code=self.code, nested=nested)

    def put(self, weight: Any, start: int, tensors: Mapping[str, Tensor]) -> None:
        super().put(weight, start, tensors)
        if self.double:
            factors = self._factors(tensors)
            first = start * weight.scale.shape[1] // PER_FACTOR
            weight.nested_factors[first : first + len(factors)] = factors

    def _factors(self, tensors: Mapping[str, Tensor]) -> Tensor:
        factor = tensors[_NESTED_ABSMAX]
        offset = _parsed(tensors[self._state].tolist()).get("nested_offset")
        if not isinstance(offset, float):
            raise OptionError("the state of a quantised layer has no nested_offset", facts={"tensor": self._state})
        return torch.stack([factor, torch.full_like(factor, offset)], 1)

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [N, K], for any N and K: a block may continue in the next row."""
        wide = torch.promote_types(dtype, torch.float32)
        absmax = tensors[_ABSMAX]
        if self.double:
            absmax = Nested(tensors[_NESTED_MAP], self._factors(tensors)).decoded(absmax)
        data, size = tensors["weight"].view(1, -1), self.group
        numbers, out = table(self.code, wide, data.device), torch.empty(n * k, dtype=dtype, device=data.device)
        step = _AT_ONCE // size
        for block in range(0, len(absmax), step):
            part = absmax[block : block + step].to(wide)
            levels = _unpacked(data[:, block * size // 2 : (block + step) * size // 2])[0]
            target = out[block * size : (block + step) * size]
            values = numbers.index_select(0, levels[: len(target)])
            target.copy_(values * part.repeat_interleave(size)[: len(target)])
        return out.view(n, k)


# The number of elements that are unpacked at once.
_AT_ONCE = 2**22


def _unpacked(data: Tensor) -> Tensor:
    """Unpack bytes [rows, K / 2] into the numbers 0 … 15, [rows, K] int32."""
    return torch.stack([data >> 4, data & 0xF], -1).flatten(1).to(torch.int32)


def _parsed(values: Sequence[Any]) -> dict[str, Any]:
    """Return the state of a layer, parsed from the bytes of a tensor; empty if the bytes are not a JSON object."""
    try:
        state = json.loads(bytes(values))
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


@stored_format("bitsandbytes_4bit")
def four_bits(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of the quantised layers. Raises `Unsupported` for anything that is not known to be correct."""
    defaults = {"_load_in_8bit": False, "load_in_8bit": False, "llm_int8_threshold": 6.0}
    only_known({name: value for name, value in config.items() if value != defaults.get(name)}, _SETTINGS, "checkpoint")
    storage, code = config.get("bnb_4bit_quant_storage") or "uint8", config.get("bnb_4bit_quant_type", "fp4")
    if storage != "uint8":
        raise Unsupported(f"its weights are stored as {storage} (bnb_4bit_quant_storage), but only uint8 is supported")
    if code not in CODES:
        raise Unsupported(f"its bnb_4bit_quant_type is {code!r}")
    return Bitsandbytes("bitsandbytes", 64, code, False)


@stored_format("bitsandbytes_8bit")
def eight_bits(config: Mapping[str, Any]) -> StoredFormat:
    """Raise `Unsupported`, because no kernel supports 8-bit checkpoints of bitsandbytes."""
    raise Unsupported("its weights have 8 bits (LLM.int8), but only 4-bit checkpoints of bitsandbytes are supported")
