"""Prompts of the gated delta rule: the convolution, the chunks in parallel, a scan over the chunks, then the norm.

Within a chunk of C tokens, token i writes a value that depends on the values that the tokens before it have written:
with the decays from token j to token i in D [C, C] (0 above the diagonal), the new values are

    N = (I + A)⁻¹ · diag(beta) · (V - diag(d) · K · S),    A = strictly lower part of diag(beta) · (K · Kᵀ ⊙ D)

where S [D_k, D_v] is the state before the chunk and d_i the decay of its first i tokens. The outputs are
diag(d) · Q · S + (Q · Kᵀ ⊙ D) · N, and the state after the chunk is d_C · S + (diag(d_C / d) · K)ᵀ · N. This is the
chunked form of https://arxiv.org/abs/2406.06484 with the decays of https://arxiv.org/abs/2412.06464.

`chunk_kernel` computes (I + A)⁻¹ · diag(beta) and Q · Kᵀ ⊙ D of all chunks, neither of which depends on S.
`recurrence_kernel` keeps some columns of S in registers and processes the chunks in order.

States are fp32, so all GEMMs have the precision of fp32 (see `kernels/parts.py`). Shapes: see `ops.delta_prefill`.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import ARCHITECTURES, GFX11, Build
from hf_rocm.ops.triton.kernels.delta import softplus
from hf_rocm.ops.triton.kernels.parts import inverted, load_parts, split, store_parts, times, total_of, transposed


@triton.jit
def causal_convolution_kernel(
    x,  # [B, S, G, R, D]
    weight,  # [C, K]
    state,  # [B, C, K] or None
    mixed,  # [PARTS, B, S, C]
    new_state,  # [B, C, K]
    length,
    plane,
    first_channel,
    channels,
    x_batch,
    x_token,
    x_group,
    x_head,
    state_batch,
    state_channel,
    state_tap,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve and apply silu, for one head. The program of the last tokens also writes the new state."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    dim = tl.arange(0, BLOCK)
    valid = dim < DIM
    channel = first_channel + head * DIM + dim
    x += batch * x_batch + head // SHARED * x_group + head % SHARED * x_head + dim
    weight += channel * TAPS
    total = tl.zeros((BLOCK_TOKENS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        at = token + (tap - TAPS + 1)
        known = (at >= 0) & (at < length)
        value = tl.load(x[None, :] + at.to(tl.int64)[:, None] * x_token, known[:, None] & valid[None, :], other=0.0)
        value = value.to(tl.float32)
        if state is not None:
            place = state + batch * state_batch + channel[None, :] * state_channel + (at + TAPS)[:, None] * state_tap
            value += tl.load(place, (at < 0)[:, None] & valid[None, :], other=0.0).to(tl.float32)
        total += value * tl.load(weight + tap, mask=valid, other=0.0).to(tl.float32)[None, :]
    total = total / (1.0 + tl.exp(-total))
    # The stock layer rounds here.
    total = total.to(x.dtype.element_ty).to(tl.float32)
    place = (batch * length + token)[:, None] * channels + channel[None, :]
    store_parts(mixed, plane, place, (token < length)[:, None] & valid[None, :], total, PARTS)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        for tap in tl.static_range(TAPS):
            begin = length - TAPS + tap
            last = tl.load(x + tl.cast(begin, tl.int64) * x_token, valid & (begin >= 0), other=0.0)
            if state is not None:
                old = state + batch * state_batch + channel * state_channel + (begin + TAPS) * state_tap
                last += tl.load(old, valid & (begin < 0), other=0.0)
            tl.store(new_state + (batch * channels + channel) * TAPS + tap, last, mask=valid)


@triton.jit
def chunk_kernel(
    mixed,  # [PARTS, B, S, C]: queries [G · D_k], keys [G · D_k], values [H · D_v]
    beta,  # [B, S, G, R]
    decay,  # [B, S, G, R]
    log_rate,  # [H]
    bias,  # [H]
    solved,  # [B, H, N, 3, CHUNK, CHUNK]: three parts of each of N chunks
    within,  # [B, H, N, 3, CHUNK, CHUNK]
    terms,  # [B, H, N, 4, CHUNK]
    length,
    chunks,
    plane,
    beta_batch,
    beta_token,
    beta_group,
    beta_head,
    decay_batch,
    decay_token,
    decay_group,
    decay_head,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
):
    """Compute everything that does not depend on the state, for one chunk and value head.

    Writes (I + A)⁻¹ · diag(beta), Q · Kᵀ ⊙ D, and for every token: the factors of its query and of its key for reading
    the state, the factor of its key for writing the state, and the decay since the start of the chunk. The factors of
    queries and keys contain the reciprocals of their norms.
    """
    heads: tl.constexpr = GROUPS * SHARED
    channels: tl.constexpr = 2 * GROUPS * KEY_DIM + heads * VALUE_DIM
    number = tl.program_id(0).to(tl.int64)
    head, batch = number // chunks % heads, number // chunks // heads
    group, shared = head // SHARED, head % SHARED
    row = tl.arange(0, CHUNK)
    token = number % chunks * CHUNK + row
    valid = token < length
    mixed += (batch * length + number % chunks * CHUNK) * channels + group * KEY_DIM
    at = row[:, None] * channels
    keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    key_square = tl.zeros((CHUNK,), tl.float32)
    query_square = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, KEY_DIM, BLOCK_KEY):
        dim = first + tl.arange(0, BLOCK_KEY)
        known = valid[:, None] & (dim < KEY_DIM)[None, :]
        query = load_parts(mixed, plane, at + dim[None, :], known, PARTS)
        key = load_parts(mixed + GROUPS * KEY_DIM, plane, at + dim[None, :], known, PARTS)
        keys += times(key, transposed(key), PARTS)
        queries += times(query, transposed(key), PARTS)
        whole = total_of(key)
        key_square += tl.sum(whole * whole, 1)
        whole = total_of(query)
        query_square += tl.sum(whole * whole, 1)
    key_scale = tl.rsqrt(key_square + 1e-6)
    query_scale = tl.rsqrt(query_square + 1e-6) / tl.sqrt(KEY_DIM * 1.0)
    logit = tl.load(
        beta + batch * beta_batch + token * beta_token + group * beta_group + shared * beta_head, mask=valid, other=0.0
    )
    strength = tl.where(valid, 1.0 / (1.0 + tl.exp(-logit.to(tl.float32))), 0.0)
    step = tl.load(
        decay + batch * decay_batch + token * decay_token + group * decay_group + shared * decay_head,
        mask=valid,
        other=0.0,
    )
    rate = tl.exp(tl.load(log_rate + head).to(tl.float32))
    gate = -rate * softplus(step.to(tl.float32) + tl.load(bias + head).to(tl.float32))
    # exp(-128) is 0; 0 · -inf would be NaN.
    gate = tl.where(valid, tl.where(gate < -128.0, -128.0, gate), 0.0)
    below = row[:, None] > row[None, :]
    lower = row[:, None] >= row[None, :]
    # sums of the gates after token j up to token i: differences of running sums would lose digits
    ones = tl.where(lower, 1.0, 0.0).to(tl.bfloat16)
    log_decays = times((ones,), split(tl.where(below, gate[:, None], 0.0), 3), 1)
    decays = tl.where(lower, tl.exp(log_decays), 0.0)
    decay_from_start = tl.exp(tl.sum(tl.where(lower, gate[None, :], 0.0), 1))
    decay_to_end = tl.exp(tl.sum(tl.where(row[:, None] < row[None, :], gate[None, :], 0.0), 1))
    queries *= decays * query_scale[:, None] * key_scale[None, :]
    keys *= decays * (strength * key_scale)[:, None] * key_scale[None, :]
    keys = tl.where(below, keys, 0.0)
    inverse = inverted(keys, row, LEVELS)
    square = row[:, None] * CHUNK + row[None, :]
    store_parts(solved + number * 3 * CHUNK * CHUNK, CHUNK * CHUNK, square, None, inverse * strength[None, :], 3)
    store_parts(within + number * 3 * CHUNK * CHUNK, CHUNK * CHUNK, square, None, queries, 3)
    terms += number * 4 * CHUNK + row
    tl.store(terms, query_scale * decay_from_start)
    tl.store(terms + CHUNK, key_scale * decay_from_start)
    tl.store(terms + 2 * CHUNK, key_scale * decay_to_end)
    tl.store(terms + 3 * CHUNK, decay_from_start)


@triton.jit
def recurrence_kernel(
    mixed,  # [PARTS, B, S, C]
    solved,  # [B, H, N, 3, CHUNK, CHUNK]
    within,  # [B, H, N, 3, CHUNK, CHUNK]
    terms,  # [B, H, N, 4, CHUNK]
    state,  # [B, H, D_k, D_v] or None
    new_state,  # [B, H, D_k, D_v]
    out,  # [B, S, H, D_v]
    length,
    chunks,
    plane,
    state_batch,
    state_head,
    state_row,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Compute some columns of one value head's outputs and state, over all chunks."""
    heads: tl.constexpr = GROUPS * SHARED
    channels: tl.constexpr = 2 * GROUPS * KEY_DIM + heads * VALUE_DIM
    number = tl.program_id(1).to(tl.int64)
    head, batch = number % heads, number // heads
    row, both, dim = tl.arange(0, CHUNK), tl.arange(0, 2 * CHUNK), tl.arange(0, BLOCK_KEY)
    column = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    is_key, is_value = (dim < KEY_DIM)[None, :], (column < VALUE_DIM)[None, :]
    if state is not None:
        begin = state + batch * state_batch + head * state_head + dim[:, None] * state_row + column[None, :]
        memory = tl.load(begin, mask=(dim < KEY_DIM)[:, None] & is_value, other=0.0)
    else:
        memory = tl.zeros((BLOCK_KEY, BLOCK_VALUE), tl.float32)
    # The pointers are scalars, which take fewer registers.
    mixed += batch * length * channels
    queries = mixed + head // SHARED * KEY_DIM
    values = mixed + 2 * GROUPS * KEY_DIM + head * VALUE_DIM
    out += (batch * length * heads + head) * VALUE_DIM
    solved += number * chunks * 3 * CHUNK * CHUNK
    within += number * chunks * 3 * CHUNK * CHUNK
    terms += number * chunks * 4 * CHUNK
    square = row[:, None] * CHUNK + row[None, :]
    # 0 for queries, 1 for keys.
    kind = (both // CHUNK)[:, None]
    at_both = (both % CHUNK)[:, None] * channels + kind * (GROUPS * KEY_DIM) + dim[None, :]
    for chunk in range(chunks):
        left = length - chunk * CHUNK
        pair = load_parts(queries, plane, at_both, (both % CHUNK < left)[:, None] & is_key, PARTS)
        read = times(pair, split(memory, 3), PARTS) * tl.load(terms + both)[:, None]
        result, read = tl.split(tl.permute(tl.reshape(read, (2, CHUNK, BLOCK_VALUE)), (1, 2, 0)))
        inside = (row < left)[:, None] & is_value
        value = load_parts(values, plane, row[:, None] * channels + column[None, :], inside, PARTS)
        value = times(load_parts(solved, CHUNK * CHUNK, square, None, 3), split(total_of(value) - read, 3), 3)
        result += times(load_parts(within, CHUNK * CHUNK, square, None, 3), split(value, 3), 3)
        at = row[:, None] * (heads * VALUE_DIM) + column[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
        known, at = (row < left)[:, None] & is_key, row[:, None] * channels + dim[None, :]
        key = load_parts(queries + GROUPS * KEY_DIM, plane, at, known, PARTS)
        memory *= tl.load(terms + 4 * CHUNK - 1)
        memory += times(transposed(key), split(value * tl.load(terms + 2 * CHUNK + row)[:, None], 3), PARTS)
        queries += CHUNK * channels
        values += CHUNK * channels
        out += CHUNK * heads * VALUE_DIM
        solved += 3 * CHUNK * CHUNK
        within += 3 * CHUNK * CHUNK
        terms += 4 * CHUNK
    end = new_state + (number * KEY_DIM + dim[:, None]) * VALUE_DIM + column[None, :]
    tl.store(end, memory, mask=(dim < KEY_DIM)[:, None] & is_value)


@triton.jit
def gated_norm_kernel(
    x,  # [B, S, H, D_v], also the output
    gate,  # [B, S, G, R, D_v]
    weight,  # [D_v]
    rows,
    length,
    eps,
    gate_batch,
    gate_token,
    gate_group,
    gate_head,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMSNorm over the last dim, times the weight, times silu(gate), in place."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)
    valid = (row < rows)[:, None] & (dim < DIM)[None, :]
    head, token = row % (GROUPS * SHARED), row // (GROUPS * SHARED)
    at_gate = gate + token // length * gate_batch + token % length * gate_token
    at_gate += head // SHARED * gate_group + head % SHARED * gate_head
    place = x + row[:, None] * DIM + dim[None, :]
    value = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    gate_value = tl.load(at_gate[:, None] + dim[None, :], mask=valid, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
    value = value * tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
    value = value * gate_value / (1.0 + tl.exp(-gate_value))
    tl.store(place, value.to(x.dtype.element_ty), mask=valid)


_PARTS = {"bf16": 1, "fp16": 2}
_RDNA = tuple(name for name, lanes in ARCHITECTURES.items() if lanes == 32)
_STRIDES = ("batch", "token", "group")


def _sizes(groups: int, shared: int, dim: int, dtype: str) -> dict[str, int]:
    sizes = {"GROUPS": groups, "SHARED": shared, "KEY_DIM": dim, "VALUE_DIM": dim}
    return {**sizes, "CHUNK": 32, "PARTS": _PARTS[dtype]}


def _build_convolution(groups: int, shared: int, dim: int, dtype: str) -> Build:
    strides = ("x_batch", "x_token", "x_group", "x_head")
    return Build(
        causal_convolution_kernel,
        {
            **dict.fromkeys(("x", "weight", "new_state"), f"*{dtype}"),
            "mixed": "*bf16",
            **dict.fromkeys(("length", "plane", "first_channel", "channels", *strides), "i32"),
        },
        {
            "state": None,
            **dict.fromkeys(("state_batch", "state_channel", "state_tap"), 0),
            **{"SHARED": shared, "DIM": dim, "TAPS": 4, "PARTS": _PARTS[dtype]},
            **{"BLOCK_TOKENS": 2048 // dim, "BLOCK": dim},
        },
        divisible=("plane", "first_channel", "channels", *strides),
    )


def _build_chunk(groups: int, shared: int, dim: int, dtype: str, lanes: int) -> Build:
    strides = [f"{name}_{part}" for name in ("beta", "decay") for part in _STRIDES]
    return Build(
        chunk_kernel,
        {
            **dict.fromkeys(("mixed", "solved", "within"), "*bf16"),
            **dict.fromkeys(("beta", "decay", "log_rate", "bias"), f"*{dtype}"),
            "terms": "*fp32",
            **dict.fromkeys(("length", "chunks", "plane", *strides), "i32"),
        },
        {"beta_head": 1, "decay_head": 1, **_sizes(groups, shared, dim, dtype), "LEVELS": 5, "BLOCK_KEY": lanes},
        threads=256,
        num_stages=1,
        divisible=("plane",),
        matrix=True,
        architectures=tuple(name for name, wave in ARCHITECTURES.items() if wave == lanes),
    )


def _build_recurrence(groups: int, shared: int, dim: int, dtype: str) -> Build:
    # with a head dim of 128, gfx11 spills about 20 registers in bf16, and gfx11 and gfx12 spill more in fp16
    omitted = () if dim < 128 else GFX11 if dtype == "bf16" else _RDNA
    return Build(
        recurrence_kernel,
        {
            **dict.fromkeys(("mixed", "solved", "within"), "*bf16"),
            **dict.fromkeys(("terms", "new_state"), "*fp32"),
            "out": f"*{dtype}",
            **dict.fromkeys(("length", "chunks", "plane"), "i32"),
        },
        {
            "state": None,
            **dict.fromkeys(("state_batch", "state_head", "state_row"), 0),
            **_sizes(groups, shared, dim, dtype),
            **{"BLOCK_KEY": dim, "BLOCK_VALUE": 32},
        },
        threads=256,
        num_stages=1,
        divisible=("plane",),
        matrix=True,
        architectures=tuple(name for name in ARCHITECTURES if name not in omitted),
    )


def _build_norm(groups: int, shared: int, dim: int, dtype: str) -> Build:
    strides = ("gate_batch", "gate_token", "gate_group", "gate_head")
    return Build(
        gated_norm_kernel,
        {
            **dict.fromkeys(("x", "gate", "weight"), f"*{dtype}"),
            "eps": "fp32",
            **dict.fromkeys(("rows", "length", *strides), "i32"),
        },
        {"GROUPS": groups, "SHARED": shared, "DIM": dim, "ROWS": 1024 // dim, "BLOCK": dim},
        divisible=strides,
    )


# The sizes of Qwen3-Next, and small heads.
BUILDS = tuple(
    build(groups, shared, dim, dtype)
    for build in (
        _build_convolution,
        partial(_build_chunk, lanes=64),
        partial(_build_chunk, lanes=32),
        _build_recurrence,
        _build_norm,
    )
    for groups, shared, dim, dtype in ((16, 2, 128, "bf16"), (16, 2, 128, "fp16"), (16, 1, 64, "bf16"))
)
