"""Routed experts in MXFP4 through hf_rocm's kernels, which read the bytes as the checkpoint stores them.

For few pairs of a token and an expert, the numbers are converted in registers. For more pairs, one kernel dequantises
several experts at once, or one at a time, into a temporary tensor. The tile sizes are estimates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_rocm.device import is_rocm
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import like
from hf_rocm.ops.mxfp4 import BLOCK
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.experts import LARGEST, WIDEST
from hf_rocm.ops.triton.launch import launch, warps
from hf_rocm.ops.triton.norm import DTYPES
from hf_rocm.ops.triton.tiles import mxfp4_down_tile, mxfp4_gate_up_tile

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.experts import ExpertsSpec, Mxfp4Call

NAME = "chosen_experts"

# The largest number of token-expert pairs for which the kernels that read the weights of every pair are preferred to
# dequantising: four times as many as in bf16, because a weight takes about a quarter of the bytes.
PAIRS = 256

ARGUMENTS = (
    "Tensor x, Tensor gate_up, Tensor gate_up_scales, Tensor? gate_up_bias, Tensor down, Tensor down_scales, "
    "Tensor? down_bias, Tensor ids, Tensor weights, str activation, float limit, float alpha"
)

# Numbers and threads of a program that dequantises.
_BLOCK, _THREADS = 1024, 128


def refuses(spec: ExpertsSpec, device: Device) -> str | None:
    """Why the kernels for few pairs can't serve these experts, or None."""
    reason = kernels_refuse(spec, device)
    if reason is not None:
        return reason
    if spec.grad:
        return "the kernels for chosen experts have no gradient"
    if not 0 < spec.pairs <= PAIRS:
        return f"there are more than {PAIRS} token-expert pairs: each would read its expert's weights again"
    if max(spec.hidden, spec.intermediate) > WIDEST:
        return f"the kernels for chosen experts write at most {WIDEST} columns"
    return None


def kernels_refuse(spec: ExpertsSpec, device: Device) -> str | None:
    """Why no kernel of this module can serve these experts, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if spec.dtype not in DTYPES:
        return f"the kernels for MXFP4 support fp32, bf16 and fp16, not {spec.dtype}"
    if not spec.contiguous:
        return "the weights aren't contiguous"
    if 2 * spec.hidden * spec.intermediate >= LARGEST:
        return f"one expert has 2³¹ weights or more: {spec.hidden} × {2 * spec.intermediate}"
    return None


def experts(call: Mxfp4Call) -> Tensor:
    """See `hf_rocm.ops.mxfp4_experts`. Rounds like separate layers, but rounds the sum over a token's experts once."""
    result: Tensor = _traced(*call)
    return result


def _forward(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    activation: str,
    limit: float,
    alpha: float,
) -> Tensor:
    out = like(x)
    tokens, top_k = ids.shape
    h_blocks, i_blocks = gate_up.shape[2], down.shape[2]
    hidden, intermediate = h_blocks * BLOCK, i_blocks * BLOCK
    if not ids.numel():
        return out.zero_()
    from hf_rocm.ops.triton.kernels import experts_mxfp4 as kernels

    spread = x.view(tokens, hidden // 8, 8).transpose(1, 2).contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    gated = x.new_empty((tokens * top_k, intermediate))
    tile = mxfp4_gate_up_tile(h_blocks, rocm=is_rocm())
    launch(
        kernels.mxfp4_gate_up,
        (tokens * top_k, -(-intermediate // tile.n)),
        (
            spread,
            _words(gate_up),
            gate_up_scales,
            None if gate_up_bias is None else gate_up_bias.contiguous(),
            ids,
            gated,
            h_blocks,
            i_blocks,
            float(limit),
            float(alpha),
        ),
        {"TOP_K": top_k, "ACTIVATION": activation, **tile.constants()},
        num_warps=warps(tile.threads, x.device),
        num_stages=tile.stages,
    )
    tile = mxfp4_down_tile(i_blocks, top_k, rocm=is_rocm())
    launch(
        kernels.mxfp4_down,
        (tokens, -(-hidden // tile.n)),
        (
            gated,
            _words(down),
            down_scales,
            None if down_bias is None else down_bias.contiguous(),
            ids,
            weights,
            out,
            hidden,
            i_blocks,
        ),
        {"TOP_K": top_k, **tile.constants()},
        num_warps=warps(tile.threads, x.device),
        num_stages=tile.stages,
    )
    return out


_traced = opaque(f"triton_mxfp4_experts({ARGUMENTS}) -> Tensor", _forward, like)


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`hf_rocm.ops.mxfp4.dequantize` of [N, K / 32, 16] in one kernel. Returns [N, K]."""
    from hf_rocm.ops.triton.kernels import experts_mxfp4 as kernels

    n, count = blocks.shape[:2]
    out = blocks.new_empty((n, count * BLOCK), dtype=dtype)
    launch(
        kernels.dequantize_mxfp4,
        (-(-out.numel() // _BLOCK),),
        (_words(blocks), scales, out, out.numel()),
        {"BLOCK": _BLOCK},
        num_warps=warps(_THREADS, blocks.device),
    )
    return out


def _words(blocks: Tensor) -> Tensor:
    """The bytes of the blocks as words of 8 numbers. A tensor from a file may be unaligned; it is then copied."""
    return (blocks if blocks.storage_offset() % 4 == 0 else blocks.clone()).view(torch.int32)
