"""Checkpoints of compressed-tensors: INT4 packed along K, and int8 or fp8 weights in their plain order.

`weight_packed` has eight numbers in a word, the first in its lowest bits, each 8 larger than its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.eight_bit import FP8, INT8
from hf_rocm.ops.four_bit import PER_WORD
from hf_rocm.weights.stored import (
    SCALES,
    EightBitFormat,
    Expected,
    FourBitFormat,
    StoredFormat,
    Tensors,
    Unsupported,
    stored_format,
)

_METHOD = "compressed-tensors"
_GROUPS = (32, 64, 128)
_EIGHT_BITS = {"int-quantized": "int", "float-quantized": "float", "naive-quantized": None}


@dataclass(frozen=True)
class PackedAlongK(FourBitFormat):
    """`weight_packed`: [N, K / 8] int32; `weight_scale`: [N, K / group]; `weight_shape`: N and K."""

    marker = "weight_packed"
    bulk = ("weight_packed", "weight_scale")
    scales = "weight_scale"

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        return {
            "weight_packed": Expected((torch.int32,), ((n, -(-k // PER_WORD)),)),
            "weight_scale": Expected(SCALES, ((n, self.groups(k)),)),
            "weight_shape": Expected((torch.int64, torch.int32), ((2,),), value=(n, k)),
        }

    def levels(self, tensors: Tensors, start: int, stop: int, k: int) -> Tensor:
        words = tensors["weight_packed"][start:stop]
        shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=words.dtype, device=words.device)
        return ((words.unsqueeze(-1) >> shifts) & 0xF).flatten(1)[:, :k]

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        runs = levels.view(len(levels), -1, PER_WORD)
        words = runs[..., 0].clone()
        for index in range(1, PER_WORD):
            words |= runs[..., index] << (4 * index)
        out[start : start + len(levels)] = words


@stored_format(_METHOD)
def parse(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of the quantised layers. Raises `Unsupported` for everything that is not known to be right."""
    _nothing_else(config)
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise Unsupported(f"its layers have {len(groups)} schemes, and only one is supported")
    group = groups[0]
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise Unsupported("the outputs of its layers are quantised")
    format = group.get("format") or config.get("format")
    if not weights.get("symmetric", True):
        raise Unsupported("its weights have zero points")
    if weights.get("dynamic"):
        raise Unsupported("the scales of its weights are dynamic")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise Unsupported(f"the groups of its weights are ordered by activation (actorder {weights['actorder']!r})")
    bits, strategy, number = weights.get("num_bits"), weights.get("strategy"), weights.get("type", "int")
    if format == "pack-quantized":
        if (bits, number) != (4, "int"):
            raise Unsupported(
                f"its weights have {bits} bits of type {number} in a packed format, and only int4 is read"
            )
        if inputs:
            raise Unsupported("its weights have 4 bits and its activations are quantised")
        return PackedAlongK(_METHOD, _group(strategy, weights.get("group_size")))
    if format not in _EIGHT_BITS:
        raise Unsupported(f"its format is {format!r}")
    if bits != 8 or _EIGHT_BITS[format] not in (None, number):
        raise Unsupported(f"its weights have {bits} bits of type {number} in the format {format!r}")
    if strategy not in ("channel", "tensor"):
        raise Unsupported(f"its 8-bit weights have a scale for each {strategy}, not for each channel or tensor")
    if inputs and inputs.get("num_bits") != 8:
        raise Unsupported(f"its activations have {inputs.get('num_bits')} bits")
    rounded = bool(inputs) and inputs.get("symmetric", True)  # our products round symmetrically, or not at all
    return EightBitFormat(_METHOD, INT8 if number == "int" else FP8, strategy == "channel", not rounded)


def _nothing_else(config: Mapping[str, Any]) -> None:
    """Refuse features that change the result of the model and are not implemented."""
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise Unsupported(f"its quantization_status is {status!r}, not 'compressed'")
    if config.get("kv_cache_scheme"):
        raise Unsupported("its key-value cache is quantised")
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise Unsupported(f"its weights are sparse ({sparsity['format']})")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise Unsupported("its weights were transformed (transform_config)")


def _group(strategy: str | None, size: int | None) -> int:
    if strategy == "channel":
        return -1
    if strategy != "group" or size not in _GROUPS:
        raise Unsupported(f"its 4-bit weights have a scale for each {strategy} of {size}")
    return size
