"""Routed experts for few pairs of a token and an expert, as in decoding, through our kernels.

They read the chosen experts' weights where they lie. With more pairs than `PAIRS` experts are chosen by several tokens,
and products that take these together read less.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.ops.opaque import opaque
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import launch, warps
from hf_rocm.ops.triton.norm import DTYPES

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.moe import ExpertsSpec
    from hf_rocm.ops.moe_torch import Form

NAME = "chosen_experts"

PAIRS = 64  # T · k up to which they come before the torch tier
LARGEST = 2**31  # elements of one expert, which 32 bits address
WIDEST = 2**16  # columns: a grid's second size has 16 bits


class Tile(NamedTuple):
    """How a product is cut. n, k: the part of each expert's weight that a program has at once, n columns of the result
    (each of a gate and an up, in the first product); experts: how many at once, in the second."""

    n: int
    k: int
    threads: int
    stages: int
    experts: int | None = None

    def constants(self) -> dict[str, int]:
        """The last of the kernel's arguments."""
        shared = {"BLOCK_N": self.n, "BLOCK_K": self.k}
        return shared if self.experts is None else {"BLOCK_E": self.experts, **shared}


def refuses(spec: ExpertsSpec, device: Device) -> str | None:
    """Why the kernels can't serve these experts, or are not known to gain, or None."""
    return detect.unavailable(device) or _limits(spec) or _gain(spec)


def _limits(spec: ExpertsSpec) -> str | None:
    if spec.grad:
        return "our kernels for chosen experts have no gradient"
    if spec.dtype not in DTYPES:
        return f"our kernels for chosen experts are for fp32, bf16 and fp16, not for {spec.dtype}"
    if spec.weight_dtype != spec.dtype:
        return f"our kernels for chosen experts need one dtype, got {spec.dtype} and {spec.weight_dtype}"
    if not spec.contiguous:
        return "the weights aren't contiguous"
    if 2 * spec.hidden * spec.intermediate >= LARGEST:
        return f"one expert has 2³¹ weights or more: {spec.hidden} × {2 * spec.intermediate}"
    if max(spec.hidden, spec.intermediate) > WIDEST:
        return f"our kernels for chosen experts write {WIDEST} columns at most"
    return None


def _gain(spec: ExpertsSpec) -> str | None:
    """Why products that take an expert's tokens together come first, unless our tier was named."""
    if 0 < spec.pairs <= PAIRS or options.current().tier("experts") == "triton":
        return None
    return f"there are more than {PAIRS} pairs of a token and an expert: each would read its expert's weights anew"


# Tiles were measured on one NVIDIA H200 in bf16, in recorded graphs, with the sizes of Qwen3-30B-A3B and, transposed,
# of gpt-oss-20b. On AMD GPUs nothing was measured: `HF_ROCM_TIER=experts=torch` gives them PyTorch's products.
SOME = 4  # tokens up to which programs of the second product must be small, or there are too few of them


def gate_up_tile(transposed: bool) -> Tile:
    """Of the first product, up to the gate. Lanes run along K, or along the columns where these are contiguous."""
    return Tile(32, 64, 256, 2) if transposed else Tile(2, 512, 64, 2)


def down_tile(tokens: int, top: int, transposed: bool) -> Tile:
    """Of the second, for so many tokens with so many experts each."""
    if not transposed:
        return Tile(2, 256, 64, 2, gcd(top, 4))
    return Tile(16, 64, 128, 2, gcd(top, 4)) if tokens <= SOME else Tile(32, 32, 128, 2, gcd(top, 4))


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Form,
) -> Tensor:
    """See `hf_rocm.ops.experts`. Rounds where separate layers do; the sum over a token's experts is rounded once."""
    result: Tensor = _traced(x, gate_up, down, ids, weights, gate_up_bias, down_bias, *form)
    return result


def _forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    transposed: bool,
    interleaved: bool,
    weigh_input: bool,
    limit: float,
    alpha: float,
) -> Tensor:
    out = _like(x)
    (tokens, top), (hidden, intermediate) = ids.shape, down.shape[1:]
    if transposed:
        hidden, intermediate = intermediate, hidden
    if not ids.numel():
        return out.zero_()
    from hf_rocm.ops.triton.kernels import experts as kernels

    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    if gate_up_bias is not None and down_bias is not None:
        gate_up_bias, down_bias = gate_up_bias.contiguous(), down_bias.contiguous()
    between = x.new_empty((tokens * top, intermediate))
    cut = gate_up_tile(transposed)
    launch(
        kernels.chosen_gate_up,
        (tokens * top, -(-intermediate // cut.n)),
        (x, gate_up, gate_up_bias, ids, weights, between, hidden, intermediate, float(limit), float(alpha)),
        {
            "TOP": top,
            "ACTIVATION": activation,
            "TRANSPOSED": transposed,
            "INTERLEAVED": interleaved,
            "WEIGH_INPUT": weigh_input,
            "EVEN": _even(intermediate, hidden, cut),
            **cut.constants(),
        },
        num_warps=warps(cut.threads, x.device),
        num_stages=cut.stages,
    )
    cut = down_tile(tokens, top, transposed)
    launch(
        kernels.chosen_down,
        (tokens, -(-hidden // cut.n)),
        (between, down, down_bias, ids, weights, out, hidden, intermediate),
        {
            "TOP": top,
            "TRANSPOSED": transposed,
            "WEIGH_INPUT": weigh_input,
            "EVEN": _even(hidden, intermediate, cut),
            **cut.constants(),
        },
        num_warps=warps(cut.threads, x.device),
        num_stages=cut.stages,
    )
    return out


def _even(n: int, k: int, cut: Tile) -> bool:
    return n % cut.n == 0 and k % cut.k == 0


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_traced = opaque(
    "triton_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, Tensor? gate_up_bias, "
    "Tensor? down_bias, str activation, bool transposed, bool interleaved, bool weigh_input, float limit, "
    "float alpha) -> Tensor",
    _forward,
    _like,
)
