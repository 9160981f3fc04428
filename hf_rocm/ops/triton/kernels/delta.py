"""One token of the gated delta rule: the convolution of every channel, then the step of every value head in registers.

There are two kernels because all value heads that share a key head need its convolution, but only one program may
update the convolution's state. Everything is computed in fp32 and rounded once. `ops.delta` defines the shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def convolution_kernel(
    query,  # [B, G, D_k]
    key,  # [B, G, D_k]
    value,  # [B, G, R, D_v]
    weight,  # [C, K]
    state,  # [B, C, K]
    mixed,  # [B, C]
    query_batch,
    query_head,
    key_batch,
    key_head,
    value_batch,
    value_group,
    value_head,
    state_batch,
    state_channel,
    state_tap,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For one head, append its inputs to the state, convolve, apply silu, and scale queries and keys to unit norm."""
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK)
    is_key = head < 2 * GROUPS
    number = head - 2 * GROUPS
    size = tl.where(is_key, KEY_DIM, VALUE_DIM)
    first = tl.where(is_key, head * KEY_DIM, 2 * GROUPS * KEY_DIM + number * VALUE_DIM)
    valid = dim < size
    # loaded in the branches: Triton's passes for AMD fail on a pointer that depends on a branch
    if head < GROUPS:
        new = tl.load(query + batch * query_batch + head * query_head + dim, mask=valid, other=0.0)
    elif is_key:
        new = tl.load(key + batch * key_batch + (head - GROUPS) * key_head + dim, mask=valid, other=0.0)
    else:
        at = value + batch * value_batch + number // SHARED * value_group + number % SHARED * value_head
        new = tl.load(at + dim, mask=valid, other=0.0)
    channel = first + dim
    state += batch * state_batch + channel * state_channel
    weight += channel * TAPS
    total = new.to(tl.float32) * tl.load(weight + (TAPS - 1), mask=valid, other=0.0).to(tl.float32)
    for tap in tl.static_range(1, TAPS):
        old = tl.load(state + tap * state_tap, mask=valid, other=0.0)
        tl.store(state + (tap - 1) * state_tap, old, mask=valid)
        total += old.to(tl.float32) * tl.load(weight + (tap - 1), mask=valid, other=0.0).to(tl.float32)
    tl.store(state + (TAPS - 1) * state_tap, new, mask=valid)
    total = total / (1.0 + tl.exp(-total))
    if is_key:
        total = total * tl.rsqrt(tl.sum(total * total, 0) + 1e-6)
    tl.store(mixed + batch * (2 * GROUPS * KEY_DIM + GROUPS * SHARED * VALUE_DIM) + channel, total, mask=valid)


@triton.jit
def delta_step_kernel(
    mixed,  # [B, C]
    gate,  # [B, G, R, D_v]
    beta,  # [B, G, R]
    decay,  # [B, G, R]
    state,  # [B, H, D_k, D_v]
    log_rate,  # [H]
    bias,  # [H]
    norm_weight,  # [D_v]
    out,  # [B, H, D_v]
    eps,
    gate_batch,
    gate_group,
    gate_head,
    beta_batch,
    beta_group,
    beta_head,
    decay_batch,
    decay_group,
    decay_head,
    state_batch,
    state_head,
    state_row,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    heads: tl.constexpr = GROUPS * SHARED
    keys: tl.constexpr = GROUPS * KEY_DIM
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    group, within = head // SHARED, head % SHARED
    row, column = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    mixed += batch * (2 * keys + heads * VALUE_DIM)
    at_key = mixed + group * KEY_DIM + row
    query = tl.load(at_key, mask=row < KEY_DIM, other=0.0)
    key = tl.load(at_key + keys, mask=row < KEY_DIM, other=0.0)
    value = tl.load(mixed + 2 * keys + head * VALUE_DIM + column, mask=column < VALUE_DIM, other=0.0)
    logit = tl.load(beta + batch * beta_batch + group * beta_group + within * beta_head).to(tl.float32)
    step = tl.load(decay + batch * decay_batch + group * decay_group + within * decay_head).to(tl.float32)
    step = softplus(step + tl.load(bias + head).to(tl.float32))
    decay_factor = tl.exp(-tl.exp(tl.load(log_rate + head).to(tl.float32)) * step)
    valid = (row[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
    place = state + batch * state_batch + head * state_head + row[:, None] * state_row + column[None, :]
    memory = tl.load(place, mask=valid, other=0.0) * decay_factor
    retrieved = tl.sum(memory * key[:, None], 0)
    change = (value - retrieved) / (1.0 + tl.exp(-logit))
    memory += key[:, None] * change[None, :]
    tl.store(place, memory, mask=valid)
    result = tl.sum(memory * query[:, None], 0) / tl.sqrt(KEY_DIM * 1.0)
    result = result * tl.rsqrt(tl.sum(result * result, 0) / VALUE_DIM + eps)
    result = result * tl.load(norm_weight + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
    at_gate = gate + batch * gate_batch + group * gate_group + within * gate_head + column
    gate_value = tl.load(at_gate, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
    result = result * gate_value / (1.0 + tl.exp(-gate_value))
    at_out = out + (batch * heads + head) * VALUE_DIM + column
    tl.store(at_out, result.to(out.dtype.element_ty), mask=column < VALUE_DIM)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate for small exp(x) too: the rounding error of the sum is divided out."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    log = tl.where(total == 1.0, small, tl.log(total) * (small / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 0.0, x + log, log)


_STRIDES = ("batch", "group", "head")


def _sizes(groups: int, shared: int, dim: int) -> dict[str, int]:
    return {"GROUPS": groups, "SHARED": shared, "KEY_DIM": dim, "VALUE_DIM": dim}


def _build_convolution(groups: int, shared: int, dim: int, dtype: str) -> Build:
    strides = [f"{name}_{part}" for name in ("query", "key") for part in ("batch", "head")]
    strides += [f"value_{part}" for part in _STRIDES]
    return Build(
        convolution_kernel,
        {
            **dict.fromkeys(("query", "key", "value", "weight", "state"), f"*{dtype}"),
            "mixed": "*fp32",
            **dict.fromkeys((*strides, "state_batch", "state_channel"), "i32"),
        },
        {"state_tap": 1, **_sizes(groups, shared, dim), "TAPS": 4, "BLOCK": triton.next_power_of_2(dim)},
        num_warps=1,
        divisible=(*strides, "state_batch"),
        options={"enable_fp_fusion": False},
    )


def _build_step(groups: int, shared: int, dim: int, dtype: str) -> Build:
    logits = [f"{name}_{part}" for name in ("beta", "decay") for part in ("batch", "group")]
    wide = [*(f"gate_{part}" for part in _STRIDES), *(f"state_{part}" for part in ("batch", "head", "row"))]
    block = triton.next_power_of_2(dim)
    return Build(
        delta_step_kernel,
        {
            "mixed": "*fp32",
            **dict.fromkeys(("gate", "beta", "decay", "log_rate", "bias", "norm_weight", "out"), f"*{dtype}"),
            "state": "*fp32",
            "eps": "fp32",
            **dict.fromkeys((*logits, *wide), "i32"),
        },
        {"beta_head": 1, "decay_head": 1, **_sizes(groups, shared, dim), "BLOCK_KEY": block, "BLOCK_VALUE": block},
        threads=512,
        divisible=tuple(wide),
        options={"enable_fp_fusion": False},
    )


# The sizes of Qwen3-Next and of the smallest Qwen3.5.
BUILDS = tuple(
    build(groups, shared, dim, dtype)
    for build in (_build_convolution, _build_step)
    for groups, shared, dim, dtype in ((16, 2, 128, "bf16"), (16, 2, 128, "fp16"), (16, 1, 128, "bf16"))
)
