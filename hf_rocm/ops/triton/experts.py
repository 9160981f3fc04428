"""Routed experts for few pairs of a token and an expert, as in decoding, through hf_rocm's kernels.

They read the chosen experts' weights in place. With more than `PAIRS` pairs, several tokens share an expert, and
GEMMs over all tokens of an expert read less memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import like
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import in_pairs, launch, warps
from hf_rocm.ops.triton.norm import DTYPES
from hf_rocm.ops.triton.tiles import ExpertsTile, down_tile, gate_up_tile

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.experts import ExpertsAddCall, ExpertsCall, ExpertsSpec

NAME = "chosen_experts"

# The largest number of token-expert pairs for which these kernels are preferred to the torch tier.
PAIRS = 64
# An expert must have fewer elements, because offsets have 32 bits.
LARGEST = 2**31
# The largest number of columns; the second dimension of a grid is limited to 16 bits.
WIDEST = 2**16


def refuses(spec: ExpertsSpec, device: Device) -> str | None:
    """Why the kernels can't serve these experts or are not known to be faster, or None."""
    return detect.unavailable(device) or _limits(spec) or _gain(spec)


def _limits(spec: ExpertsSpec) -> str | None:
    if spec.grad:
        return "the kernels for chosen experts have no gradient"
    if spec.dtype not in DTYPES:
        return f"the kernels for chosen experts support fp32, bf16 and fp16, not {spec.dtype}"
    if spec.weight_dtype != spec.dtype:
        return f"the kernels for chosen experts need one dtype, got {spec.dtype} and {spec.weight_dtype}"
    if not spec.contiguous:
        return "the weights aren't contiguous"
    if 2 * spec.hidden * spec.intermediate >= LARGEST:
        return f"one expert has 2³¹ weights or more: {spec.hidden} × {2 * spec.intermediate}"
    if max(spec.hidden, spec.intermediate) > WIDEST:
        return f"the kernels for chosen experts write at most {WIDEST} columns"
    return None


def _gain(spec: ExpertsSpec) -> str | None:
    """Why GEMMs over all tokens of an expert are preferred, or None if they aren't or the triton tier was requested."""
    if 0 < spec.pairs <= PAIRS or options.current().tier("experts") == "triton":
        return None
    return f"there are more than {PAIRS} token-expert pairs: each would read its expert's weights again"


def experts(call: ExpertsCall) -> Tensor:
    """See `hf_rocm.ops.experts`. Rounds where separate layers do, but rounds the sum over a token's experts once."""
    *tensors, form = call
    result: Tensor = _traced(*tensors, None, *form)
    return result


def experts_add(call: ExpertsAddCall) -> Tensor:
    """See `hf_rocm.ops.experts_add`. Rounds like `experts`, and once more after the residual sum."""
    residual, *tensors, form = call
    result: Tensor = _traced(*tensors, residual, *form)
    return result


def _forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    transposed: bool,
    interleaved: bool,
    weigh_input: bool,
    limit: float,
    alpha: float,
) -> Tensor:
    out = like(x)
    (tokens, top_k), (hidden, intermediate) = ids.shape, down.shape[1:]
    if transposed:
        hidden, intermediate = intermediate, hidden
    if not ids.numel():
        return out.zero_() if residual is None else out.copy_(residual)
    from hf_rocm.ops.triton.kernels import experts as kernels

    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    if gate_up_bias is not None and down_bias is not None:
        gate_up_bias, down_bias = gate_up_bias.contiguous(), down_bias.contiguous()
    if residual is not None:
        residual = residual.contiguous()
    gated = x.new_empty((tokens * top_k, intermediate))
    pairs = not transposed and in_pairs(hidden, x, gate_up)
    k = hidden // 2 if pairs else hidden
    tile = gate_up_tile(transposed)
    launch(
        kernels.chosen_gate_up,
        (tokens * top_k, -(-intermediate // tile.n)),
        (x, gate_up, gate_up_bias, ids, weights, gated, k, intermediate, float(limit), float(alpha)),
        {
            "TOP_K": top_k,
            "ACTIVATION": activation,
            "TRANSPOSED": transposed,
            "INTERLEAVED": interleaved,
            "WEIGH_INPUT": weigh_input,
            "PAIRS": pairs,
            "EVEN": _even(intermediate, hidden, tile),
            **tile.constants(),
        },
        num_warps=warps(tile.threads, x.device),
        num_stages=tile.stages,
    )
    pairs = not transposed and in_pairs(intermediate, gated, down)
    k = intermediate // 2 if pairs else intermediate
    tile = down_tile(tokens, top_k, transposed, rocm=describe(x.device).rocm)
    launch(
        kernels.chosen_down,
        (tokens, -(-hidden // tile.n)),
        (gated, down, down_bias, ids, weights, residual, out, hidden, k),
        {
            "TOP_K": top_k,
            "TRANSPOSED": transposed,
            "WEIGH_INPUT": weigh_input,
            "PAIRS": pairs,
            "EVEN": _even(hidden, intermediate, tile),
            **tile.constants(),
        },
        num_warps=warps(tile.threads, x.device),
        num_stages=tile.stages,
    )
    return out


def _even(n: int, k: int, tile: ExpertsTile) -> bool:
    return n % tile.n == 0 and k % tile.k == 0


_traced = opaque(
    "triton_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, Tensor? gate_up_bias, "
    "Tensor? down_bias, Tensor? residual, str activation, bool transposed, bool interleaved, bool weigh_input, "
    "float limit, float alpha) -> Tensor",
    _forward,
    like,
)
