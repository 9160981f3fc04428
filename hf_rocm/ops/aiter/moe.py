"""Routed experts through aiter's `fused_moe`: the sort by expert, the GEMMs and the weighted sum in a few kernels.

Its 16-bit kernels require shuffled weights, and silently return wrong results for weights in the plain order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import rows
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import like

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.experts import ExpertsCall, ExpertsSpec

NAME = "fused_moe:fused_moe"
# aiter looks up its kernels by architecture.
ARCHITECTURES = ("gfx942", "gfx950")
# The smallest tile of its kernels along H and I.
STEP = 64


def plain_refuses(spec: ExpertsSpec, device: Device) -> str | None:
    """Why `fused_moe` can't serve weights in the plain order; never None."""
    return detect.unavailable(device) or "fused_moe reads only shuffled weights, but these are not shuffled"


def shuffled_refuses(spec: ExpertsSpec, device: Device) -> str | None:
    """Why `fused_moe` can't serve weights in the shuffled order, or None."""
    reason = detect.unavailable(device)
    if reason is not None:
        return reason
    if device.arch not in ARCHITECTURES:
        return f"fused_moe is for {', '.join(ARCHITECTURES)}, not for {device.arch}"
    if spec.grad:
        return "fused_moe has no gradient"
    if spec.dtype not in (torch.float16, torch.bfloat16) or spec.weight_dtype != spec.dtype:
        return f"fused_moe needs x and weights of one dtype, fp16 or bf16, got {spec.dtype} and {spec.weight_dtype}"
    if spec.activation != "silu":
        return f"fused_moe is used only for silu, not for {spec.activation}"
    if spec.bias:
        return "fused_moe has no bias for 16-bit weights"
    if spec.transposed or spec.interleaved or spec.weigh_input:
        return "fused_moe needs [gate | up] as [2I, H], and applies the routing weights to the outputs"
    if spec.hidden % STEP or spec.intermediate % STEP:
        return f"fused_moe needs sizes that are multiples of {STEP}, got {spec.hidden} and {spec.intermediate}"
    return why_not(_kernel())


def shuffled_experts(call: ExpertsCall) -> Tensor:
    """See `hf_rocm.ops.shuffled_experts`; the biases are always None here, and the form is `moe_shuffled.PLAIN`."""
    result: Tensor = _traced(call.x, call.gate_up, call.down, call.ids, call.weights)
    return result


def _kernel() -> contract.Call | str:
    return contract.function(NAME, frozenset(("hidden_states", "w1", "w2", "topk_weight", "topk_ids")))


def _experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if not ids.numel():
        return like(x)
    first, second = gate_up.view(gate_up.shape), down.view(down.shape)
    first.is_shuffled = second.is_shuffled = True  # type: ignore[attr-defined]
    kernel: Any = _kernel()
    output: Tensor = kernel(
        hidden_states=rows(x),
        w1=first,
        w2=second,
        topk_weight=weights.to(torch.float32).contiguous(),
        topk_ids=ids.to(torch.int32).contiguous(),
    )
    return output


_traced = opaque(
    "aiter_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights) -> Tensor", _experts, like
)
