"""Checkpoints of compressed-tensors: INT4 and MXFP4 packed along K, and int8 or fp8 weights in plain order.

For INT4, `weight_packed` has eight numbers per word, the first in the lowest bits, and 8 is added to every number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.eight_bit import FP8, INT8
from hf_rocm.ops.four_bit import INT4, PER_WORD
from hf_rocm.ops.mxfp4 import BLOCK, BYTES, MXFP4, dequantize
from hf_rocm.ops.mxfp4 import pack as mxfp4_bytes
from hf_rocm.weights.encoding import QuantizedWeight
from hf_rocm.weights.mxfp4_weight import Mxfp4Weight
from hf_rocm.weights.stored import (
    IN_ORDER,
    SCALES,
    EightBitFormat,
    Expected,
    FourBitFormat,
    StoredFormat,
    Tensors,
    Unsupported,
    only_known,
    pack,
    stored_format,
    unpack,
)

_METHOD = "compressed-tensors"
_GROUPS = (32, 64, 128)
# The settings whose meaning is known, or which do not affect the result. Any other setting is refused if it is set.
_SETTINGS = (
    "quant_method",
    "format",
    "quantization_status",
    "config_groups",
    "ignore",
    "global_compression_ratio",
    "version",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    "run_compressed",
    "dequantize",
    "use_optimized_inference",
)
_OF_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_OF_WEIGHTS = (
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)
_EIGHT_BITS = {"int-quantized": "int", "float-quantized": "float", "naive-quantized": None}


@dataclass(frozen=True)
class PackedAlongK(FourBitFormat):
    """`weight_packed`: [N, ⌈K / 8⌉] int32; `weight_scale`: [N, ⌈K / group⌉]; `weight_shape`: N and K.

    `weight_zero_point`: [⌈N / 8⌉, ⌈K / group⌉] int32, packed along N; absent without zero points.
    """

    marker = "weight_packed"
    bulk = ("weight_packed", "weight_scale", "weight_zero_point")
    scales, zero_points = "weight_scale", "weight_zero_point"
    symmetric: bool

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        tensors = {
            "weight_packed": Expected((torch.int32,), ((n, -(-k // PER_WORD)),)),
            "weight_scale": Expected(SCALES, ((n, self.groups(k)),)),
            "weight_shape": Expected(
                (torch.int64, torch.int32),
                ((2,),),
                check=lambda shape: None if shape == (n, k) else f"{shape} for a layer of {(n, k)}",
            ),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = Expected((torch.int32,), ((-(-n // PER_WORD), self.groups(k)),))
        return tensors

    def zeros(self, tensors: Tensors, n: int) -> Tensor | None:
        if self.symmetric:
            return None
        return unpack(tensors["weight_zero_point"].t(), IN_ORDER).flatten(1).t()[:n].to(torch.uint8)

    def from_zeros(self, zeros: Tensor) -> Tensor:
        return pack(zeros.t().unflatten(1, (-1, PER_WORD)), IN_ORDER).t()

    def levels(self, tensors: Tensors, start: int, stop: int, k: int) -> Tensor:
        return unpack(tensors["weight_packed"][start:stop], IN_ORDER).flatten(1)[:, :k]

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        out[start : start + len(levels)] = pack(levels.view(len(levels), -1, PER_WORD), IN_ORDER)


@dataclass(frozen=True)
class Mxfp4Packed(FourBitFormat):
    """`weight_packed`: [N, K / 2] uint8, two numbers per byte, as in `ops.mxfp4`; `weight_scale`: [N, K / 32] uint8."""

    marker = "weight_packed"
    bulk = ("weight_packed", "weight_scale")
    scales, zero_points = "weight_scale", ""

    def described(self) -> str:
        return f"MXFP4 ({self.library})"

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        if k % BLOCK:
            raise Unsupported(f"the number of inputs of a layer, {k}, is not a multiple of {BLOCK}")
        return {
            "weight_packed": Expected((MXFP4,), ((n, k // 2),)),
            "weight_scale": Expected((MXFP4,), ((n, k // BLOCK),)),
        }

    def zeros(self, tensors: Tensors, n: int) -> Tensor | None:
        return None

    def levels(self, tensors: Tensors, start: int, stop: int, k: int) -> Tensor:
        pairs = tensors["weight_packed"][start:stop].to(INT4)
        return torch.stack((pairs & 0xF, pairs >> 4), -1).flatten(1)

    def put_levels(self, out: Tensor, start: int, levels: Tensor) -> None:
        out[start : start + len(levels)] = mxfp4_bytes(levels).flatten(1)

    def empty(self, n: int, k: int, layers: Sequence[Tensors], bias: Tensor | None) -> QuantizedWeight:
        return Mxfp4Weight.empty(n, layers[0]["weight_scale"].new_empty(0, k), BLOCK, bias)

    def read(self, tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
        blocks = tensors["weight_packed"].unflatten(1, (-1, BYTES))
        return dequantize(blocks, tensors["weight_scale"], dtype)


@dataclass(frozen=True)
class PlainOrder(EightBitFormat):
    """`weight_scale`: one scale per tensor or one per row."""

    marker = "weight_scale"

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        return {
            **super().expected(n, k),
            # the scale and zero point of activations: no GEMM here uses them, but they are saved again
            "input_scale": Expected(SCALES, self.one, required=False),
            "input_zero_point": Expected((INT8, FP8, torch.int32, *SCALES), self.one, required=False),
        }


@stored_format(_METHOD)
def parse(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of the quantised layers. Raises `Unsupported` for anything that is not known to be correct."""
    _refuse_unsupported(config)
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise Unsupported(f"its layers have {len(groups)} schemes, but only one is supported")
    group = groups[0]
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise Unsupported("the outputs of its layers are quantised")
    format = group.get("format") or config.get("format")
    symmetric = bool(weights.get("symmetric", True))
    if weights.get("dynamic"):
        raise Unsupported("the scales of its weights are dynamic")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise Unsupported(f"the groups of its weights are ordered by activation (actorder {weights['actorder']!r})")
    bits, strategy, number = weights.get("num_bits"), weights.get("strategy"), weights.get("type", "int")
    if format == "pack-quantized":
        if (bits, number) != (4, "int"):
            raise Unsupported(
                f"its weights have {bits} bits of type {number} in a packed format, but only int4 is supported"
            )
        if inputs:
            raise Unsupported("its weights have 4 bits and its activations are quantised")
        return PackedAlongK(_METHOD, _group(strategy, weights.get("group_size")), symmetric)
    if format == "mxfp4-pack-quantized":
        if (bits, number, strategy, weights.get("group_size")) != (4, "float", "group", BLOCK) or not symmetric:
            raise Unsupported(f"its weights are not blocks of {BLOCK} 4-bit floats")
        if inputs:
            raise Unsupported("its weights have 4 bits and its activations are quantised")
        return Mxfp4Packed(_METHOD, BLOCK)
    if format not in _EIGHT_BITS:
        raise Unsupported(f"its format is {format!r}")
    if bits != 8 or _EIGHT_BITS[format] not in (None, number):
        raise Unsupported(f"its weights have {bits} bits of type {number} in the format {format!r}")
    if not symmetric:
        raise Unsupported("its 8-bit weights have zero points")
    if strategy not in ("channel", "tensor"):
        raise Unsupported(f"its 8-bit weights have the strategy {strategy!r}, not 'channel' or 'tensor'")
    if inputs and inputs.get("num_bits") != 8:
        raise Unsupported(f"its activations have {inputs.get('num_bits')} bits")
    # hf_rocm's GEMMs round x symmetrically or not at all.
    rounded = bool(inputs) and inputs.get("symmetric", True)
    scale_for = "row" if strategy == "channel" else "tensor"
    return PlainOrder(_METHOD, INT8 if number == "int" else FP8, scale_for, not rounded)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuse features that change the model's result and are not implemented."""
    for group in (config.get("config_groups") or {}).values():
        only_known(group, _OF_GROUP, "layers")
        only_known(group.get("weights") or {}, _OF_WEIGHTS, "weights")
    only_known(config, _SETTINGS, "checkpoint")
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
        raise Unsupported(f"its 4-bit weights have the strategy {strategy!r} and the group size {size}")
    return size
