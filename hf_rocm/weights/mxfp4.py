"""Checkpoints of gpt-oss (transformers' `Mxfp4Config`): experts as blocks of 32 4-bit floats with a shared scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_rocm.ops.mxfp4 import BLOCK, BYTES, MXFP4
from hf_rocm.weights.mxfp4_experts import DOWN, GATE_UP
from hf_rocm.weights.stored import SCALES, Expected, StoredFormat, Unsupported, only_known, stored_format

# modules_to_not_convert is ignored, because the tensors show which layers are quantised
_SETTINGS = ("quant_method", "modules_to_not_convert")


@dataclass(frozen=True)
class Mxfp4(StoredFormat):
    """For both gate_up [E, 2I, H] and down [E, H, I]: `…_blocks` [E, N, K / 32, 16], `…_scales` [E, N, K / 32] and
    `…_bias` [E, N]."""

    marker = f"{DOWN}_blocks"
    bulk = tuple(f"{name}_{part}" for name in (GATE_UP, DOWN) for part in ("blocks", "scales"))
    plain = (f"{GATE_UP}_bias", f"{DOWN}_bias")

    def described(self) -> str:
        return "experts in MXFP4 (transformers)"

    def expected(self, experts: int, hidden: int, intermediate: int) -> dict[str, Expected]:
        if hidden % BLOCK or intermediate % BLOCK:
            raise Unsupported(f"the sizes {hidden} × {intermediate} of its experts are not multiples of {BLOCK}")
        tensors = {}
        for name, n, k in ((GATE_UP, 2 * intermediate, hidden), (DOWN, hidden, intermediate)):
            shape = experts, n, k // BLOCK
            tensors[f"{name}_blocks"] = Expected((MXFP4,), ((*shape, BYTES),))
            tensors[f"{name}_scales"] = Expected((MXFP4,), (shape,))
            tensors[f"{name}_bias"] = Expected(SCALES, ((experts, n),))
        return tensors


@stored_format("mxfp4")
def parse(config: Mapping[str, Any]) -> StoredFormat:
    """Return the format of the experts. Raises `Unsupported` for settings that are not known to be supported."""
    only_known(config, _SETTINGS, "checkpoint")
    return Mxfp4()
