"""Checkpoints with transformers' `FineGrainedFP8Config`, such as DeepSeek's: fp8 with one scale per 128 × 128 block.

Every number is multiplied by the `weight_scale_inv` of its block, which may be a power of two that is stored in one
byte (`scale_fmt` `ue8m0`). Without blocks, there is one scale per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_rocm.ops.eight_bit import BLOCK, FP8
from hf_rocm.weights.stored import (
    SCALES,
    EightBitFormat,
    Expected,
    StoredFormat,
    Unsupported,
    only_known,
    stored_format,
)

# The settings whose meaning is known, or which do not affect the result.
_SETTINGS = (
    "quant_method",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "scale_fmt",
    "expert_dtype",
)
_POWERS = tuple(dtype for dtype in (getattr(torch, "float8_e8m0fnu", None),) if dtype is not None)
# The supported values of some settings.
_VALUES = {"fmt": ("e4m3",), "activation_scheme": ("dynamic", "static"), "expert_dtype": ("fp8",)}


@dataclass(frozen=True)
class FinegrainedFp8(EightBitFormat):
    """`weight_scale_inv`: [⌈N / 128⌉, ⌈K / 128⌉], or one number; `activation_scale`: one number, for static scales."""

    marker = "weight_scale_inv"
    scale_dtypes = (*SCALES, *_POWERS)

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        # the scale of activations: no GEMM here uses it, but it is written when the model is saved
        return {**super().expected(n, k), "activation_scale": Expected(SCALES, self.one, required=False)}


@stored_format("fp8")
def parse(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of the quantised layers. Raises `Unsupported` for anything that is not known to be correct."""
    only_known(config, _SETTINGS, "checkpoint")
    for name, known in _VALUES.items():
        value = config.get(name) or known[0]
        if value not in known:
            raise Unsupported(f"its {name} is {value!r}")
    if config.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise Unsupported(f"its scale_fmt is {config['scale_fmt']!r}")
    size = config.get("weight_block_size", (BLOCK, BLOCK))
    if size is None:
        return FinegrainedFp8("fp8", FP8, "tensor", False)
    if list(size) != [BLOCK, BLOCK]:
        raise Unsupported(f"its block size is {' × '.join(map(str, size))}")
    return FinegrainedFp8("fp8", FP8, "block", True)
