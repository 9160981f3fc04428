"""Run prompts of the gated delta rule in four kernels: convolution, chunks, the scan of chunks, and the gated norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.triton import delta
from hf_rocm.ops.triton.launch import lanes, launch, power_of_two, warps

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.specs.delta import DeltaSpec, PrefillCall

NAME = "recurrence_kernel"

# In tokens. With 64, RDNA would spill registers.
CHUNK = 32
# How many bf16 numbers represent a number of the dtype.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
LARGEST_KEY = 256


def refuses(spec: DeltaSpec, device: Device) -> str | None:
    """Why the kernels can't compute this prompt, or None."""
    if spec.key_dim > LARGEST_KEY:
        return f"the gated delta kernels take key head dims of up to {LARGEST_KEY} for prompts, got {spec.key_dim}"
    return delta.refuses(spec._replace(key_dim=1, value_dim=1), device)


def gated_delta_prefill(call: PrefillCall) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_rocm.ops.gated_delta_prefill`."""
    result: tuple[Tensor, Tensor, Tensor] = _traced(*call)
    return result


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor | None,
    state: Tensor | None,
    log_rate: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from hf_rocm.ops.triton.kernels import delta_prefill as kernels

    query, key, value, gate = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, gate))
    state = state if state is None or state.stride(-1) == 1 else state.contiguous()
    batch, length, groups, shared, value_dim = value.shape
    heads, key_dim, channels = groups * shared, query.shape[3], conv_weight.shape[0]
    results = _empty(query, key, value, gate, beta, decay, conv_weight)
    if not batch * length:
        for result, known in zip(results[1:], (conv_state, state), strict=True):
            result.zero_() if known is None else result.copy_(known)
        return results
    out, new_conv_state, new_state = results
    parts, plane = PARTS[query.dtype], batch * length * channels
    mixed = torch.empty((parts, batch, length, channels), dtype=torch.bfloat16, device=query.device)
    conv_weight, first = conv_weight.contiguous(), 0
    for x in (query.unsqueeze(3), key.unsqueeze(3), value):
        dim = x.shape[4]
        tokens = _tokens(dim)
        launch(
            kernels.causal_convolution_kernel,
            (-(-length // tokens), x.shape[2] * x.shape[3], batch),
            (
                x,
                conv_weight,
                conv_state,
                mixed,
                new_conv_state,
                length,
                plane,
                first,
                channels,
                *x.stride()[:4],
                *((0, 0, 0) if conv_state is None else conv_state.stride()),
            ),
            {
                "SHARED": x.shape[3],
                "DIM": dim,
                "TAPS": conv_weight.shape[1],
                "PARTS": parts,
                "BLOCK_TOKENS": tokens,
                "BLOCK": power_of_two(dim),
            },
            num_warps=4,
        )
        first += x.shape[2] * x.shape[3] * dim
    sizes = {"GROUPS": groups, "SHARED": shared, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "CHUNK": CHUNK}
    chunks = -(-length // CHUNK)
    squares = (batch, heads, chunks, 3, CHUNK, CHUNK)
    solved = torch.empty(squares, dtype=torch.bfloat16, device=query.device)
    within = torch.empty(squares, dtype=torch.bfloat16, device=query.device)
    terms = torch.empty((batch, heads, chunks, 4, CHUNK), dtype=torch.float32, device=query.device)
    launch(
        kernels.chunk_kernel,
        (batch * heads * chunks,),
        (
            mixed,
            beta,
            decay,
            log_rate.contiguous(),
            bias.contiguous(),
            solved,
            within,
            terms,
            length,
            chunks,
            plane,
            *beta.stride(),
            *decay.stride(),
        ),
        {**sizes, "PARTS": parts, "LEVELS": CHUNK.bit_length() - 1, "BLOCK_KEY": block_key(key_dim, query.device)},
        num_warps=warps(256, query.device),
        num_stages=1,
    )
    columns = block_value(key_dim, value_dim)
    launch(
        kernels.recurrence_kernel,
        (-(-value_dim // columns), batch * heads),
        (
            mixed,
            solved,
            within,
            terms,
            state,
            new_state,
            out,
            length,
            chunks,
            plane,
            *((0, 0, 0) if state is None else state.stride()[:3]),
        ),
        {**sizes, "PARTS": parts, "BLOCK_KEY": max(16, power_of_two(key_dim)), "BLOCK_VALUE": columns},
        num_warps=warps(256, query.device),
        num_stages=1,
    )
    rows, block = batch * length * heads, power_of_two(value_dim)
    rows_per_program = max(1, 1024 // block)
    launch(
        kernels.gated_norm_kernel,
        (-(-rows // rows_per_program),),
        (out, gate, norm_weight.contiguous(), rows, length, float(eps), *gate.stride()[:4]),
        {"GROUPS": groups, "SHARED": shared, "DIM": value_dim, "ROWS": rows_per_program, "BLOCK": block},
        num_warps=4,
    )
    return results


def block_key(key_dim: int, device: torch.device) -> int:
    """The number of columns of queries and keys that a program multiplies at a time; RDNA has fewer registers."""
    return max(16, min(lanes(device), power_of_two(key_dim)))


def block_value(key_dim: int, value_dim: int) -> int:
    """The number of columns of the state in a program: fewer for wide keys, because registers hold the columns."""
    return max(16, min(32 if key_dim <= 128 else 16, power_of_two(value_dim)))


def _tokens(dim: int) -> int:
    """The number of tokens in a program of the convolution."""
    return max(1, 2048 // power_of_two(dim))


def _empty(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    conv_weight: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, groups, shared, value_dim = value.shape
    return (
        value.new_empty((batch, length, groups * shared, value_dim)),
        value.new_empty((batch, *conv_weight.shape)),
        value.new_empty((batch, groups * shared, query.shape[3], value_dim), dtype=torch.float32),
    )


_traced: Any = opaque(
    "triton_gated_delta_prefill(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor decay, "
    "Tensor conv_weight, Tensor? conv_state, Tensor? state, Tensor log_rate, Tensor bias, Tensor norm_weight, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    _forward,
    _empty,
)
