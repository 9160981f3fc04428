"""One token of the gated delta rule in two kernels: the convolution, and the step of every value head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton.launch import launch, power_of_two, warps
from hf_rocm.ops.triton.norm import DTYPES

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.delta import DeltaCall, DeltaSpec

NAME = "delta_step_kernel"

# The largest state of one head, in elements; a program keeps it in registers.
LARGEST_STATE = 256 * 128


def refuses(spec: DeltaSpec, device: Device) -> str | None:
    """Why the kernels can't compute this step, or None."""
    if spec.grad:
        return "the gated delta kernels have no gradient"
    if spec.dtype not in DTYPES or spec.weight_dtype not in DTYPES:
        return (
            f"the gated delta kernels support fp32, bf16 and fp16, not {spec.dtype} with weights of {spec.weight_dtype}"
        )
    if spec.state_dtype != torch.float32:
        return f"the gated delta kernels update states in fp32, not {spec.state_dtype}"
    if power_of_two(spec.key_dim) * power_of_two(spec.value_dim) > LARGEST_STATE:
        return (
            f"the gated delta kernels support states of up to {LARGEST_STATE} elements per head (dims rounded up to "
            f"powers of two), got {spec.key_dim} by {spec.value_dim}"
        )
    return detect.unavailable(device)


def gated_delta_step(call: DeltaCall) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_rocm.ops.gated_delta_step`. Also returns the two states."""
    out: Tensor = _traced(*call)
    return out, call.conv_state, call.state


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    from hf_rocm.ops.triton.kernels.delta import convolution_kernel, delta_step_kernel

    query, key, value, gate = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, gate))
    batch, groups, shared, value_dim = value.shape
    heads, key_dim, channels = groups * shared, query.shape[2], conv_state.shape[1]
    out = _empty(query, key, value)
    if not batch:
        return out
    mixed = torch.empty((batch, channels), dtype=torch.float32, device=query.device)
    sizes = {"GROUPS": groups, "SHARED": shared, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    launch(
        convolution_kernel,
        (batch, 2 * groups + heads),
        (
            query,
            key,
            value,
            conv_weight.contiguous(),
            conv_state,
            mixed,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:3],
            *conv_state.stride()[:2],
            conv_state.stride(2),
        ),
        {**sizes, "TAPS": conv_state.shape[2], "BLOCK": power_of_two(max(key_dim, value_dim))},
        # No lane may overwrite an input that another warp still reads.
        num_warps=1,
        contract=False,
    )
    block_key, block_value = power_of_two(key_dim), power_of_two(value_dim)
    launch(
        delta_step_kernel,
        (batch * heads,),
        (
            mixed,
            gate,
            beta,
            decay,
            state,
            log_rate.contiguous(),
            bias.contiguous(),
            norm_weight.contiguous(),
            out,
            float(eps),
            *gate.stride()[:3],
            *beta.stride(),
            *decay.stride(),
            *state.stride()[:3],
        ),
        {**sizes, "BLOCK_KEY": block_key, "BLOCK_VALUE": block_value},
        num_warps=warps(threads(block_key, block_value), query.device),
        # lanes that store the same sum would round it differently if each lane fused its own product with the sum
        contract=False,
    )
    return out


def threads(block_key: int, block_value: int) -> int:
    """Threads of a program: one for every 32 elements of the state, but at least 64 and at most 512."""
    return min(512, max(64, block_key * block_value // 32))


def _empty(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, groups, shared, value_dim = value.shape
    return value.new_empty((batch, groups * shared, value_dim))


_traced: Any = opaque(
    "triton_gated_delta_step(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor decay, "
    "Tensor conv_weight, Tensor(a!) conv_state, Tensor(b!) state, Tensor log_rate, Tensor bias, Tensor norm_weight, "
    "float eps) -> Tensor",
    _forward,
    _empty,
)
