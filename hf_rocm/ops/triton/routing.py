"""Choose the experts of every token with hf_rocm's kernel: one program of one warp per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.specs.experts import RoutingCall, RoutingSpec
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import launch, power_of_two
from hf_rocm.ops.triton.norm import DTYPES

if TYPE_CHECKING:
    from hf_rocm.device import Device

NAME = "routing_kernel"

MOST_EXPERTS = 1024
MOST_CHOSEN = 32


def refuses(spec: RoutingSpec, device: Device) -> str | None:
    """The reason why the kernel can't choose these experts, or None."""
    if spec.grad:
        return "the routing kernel has no gradient"
    if spec.dtype not in DTYPES or spec.weight_dtype not in DTYPES:
        return f"the routing kernel supports fp32, bf16 and fp16, not {spec.dtype} with weights of {spec.weight_dtype}"
    if spec.experts > MOST_EXPERTS or spec.top_k > MOST_CHOSEN:
        return (
            f"the routing kernel chooses up to {MOST_CHOSEN} of {MOST_EXPERTS} experts, not {spec.top_k} of "
            f"{spec.experts}"
        )
    if not 0 < spec.top_k <= spec.experts:
        return f"{spec.top_k} of {spec.experts} experts can't be chosen"
    if spec.biased and spec.scores == "softmax of the chosen":
        return "the routing kernel adds no bias to logits"
    return _groups(spec) or detect.unavailable(device)


def _groups(spec: RoutingSpec) -> str | None:
    if spec.groups == 1:
        return None
    if spec.scores not in ("softmax", "sigmoid"):
        return "the routing kernel supports groups only with softmax or sigmoid scores"
    if spec.experts % spec.groups or not 0 < spec.chosen_groups <= spec.groups:
        return f"{spec.chosen_groups} of {spec.groups} groups of {spec.experts} experts can't be chosen"
    size = spec.experts // spec.groups
    if size & (size - 1) or spec.groups & (spec.groups - 1):
        return f"the number of groups and their size must be powers of two, got {spec.groups} of {size}"
    if spec.best not in (1, 2) or size < spec.best:
        return f"the routing kernel ranks groups by their best one or two experts, got {spec.best} of {size}"
    if spec.chosen_groups * size < spec.top_k:
        return f"{spec.chosen_groups} groups of {size} have fewer than {spec.top_k} experts"
    return None


def choose_experts(call: RoutingCall) -> tuple[Tensor, Tensor]:
    """See `hf_rocm.ops.choose_experts`."""
    result: tuple[Tensor, Tensor] = _traced(*call)
    return result


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = RoutingCall(*arguments)
    weights, ids = _empty(*arguments)
    tokens, experts = call.logits.shape
    if tokens:
        from hf_rocm.ops.triton.kernels.routing import routing_kernel

        launch(
            routing_kernel,
            (tokens,),
            (
                call.logits.contiguous(),
                None if call.bias is None else call.bias.contiguous(),
                weights,
                ids,
                float(call.epsilon),
                float(call.scale),
            ),
            {
                "EXPERTS": experts,
                "TOP_K": call.top_k,
                "SCORES": call.scores,
                "GROUPS": call.groups,
                "CHOSEN_GROUPS": call.chosen_groups,
                "BEST": call.best,
                "NORMALISE": call.normalise,
                "BLOCK": power_of_two(experts),
                "BLOCK_TOP_K": power_of_two(call.top_k),
            },
            # Every reduction stays within the warp.
            num_warps=1,
        )
    return weights, ids


def _empty(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = RoutingCall(*arguments)
    shape = (call.logits.shape[0], call.top_k)
    return call.logits.new_empty(shape, dtype=call.dtype), call.logits.new_empty(shape, dtype=torch.int64)


_traced = opaque(
    "triton_choose_experts(Tensor logits, Tensor? bias, int top, str scores, int groups, int chosen_groups, int best, "
    "bool normalise, float epsilon, float scale, ScalarType dtype) -> (Tensor, Tensor)",
    _forward,
    _empty,
)
