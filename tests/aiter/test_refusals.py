"""Refusals of the aiter tier, identified by their sentences in `explain`."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.device import Device
from hf_rocm.ops.aiter import activation, decode, linear, norm, rope, triton
from tests.aiter.specifications import (
    ACTIVATION,
    ASSEMBLY,
    ATTENTION,
    BF16,
    DECODE,
    DECODING,
    DENSE,
    FLASH,
    FP32,
    LINEAR,
    LSE,
    MHA,
    NEWEST,
    NORM,
    OLD,
    PACKED,
    ROPE,
    VARLEN,
    WHEEL,
)

MASK = "aiter takes one [S_q, S_k] bias, not a mask for each batch row"

CASES = [
    # refused by every kernel for dense attention
    (MHA, ATTENTION, {"dtype": FP32}, "aiter's attention takes fp16 and bf16, not fp32"),
    (MHA, ATTENTION, {"weights": True}, "aiter's kernels don't return attention weights"),
    (
        MHA,
        ATTENTION,
        {"mask": torch.bool},
        MASK,
    ),
    (MHA, ATTENTION, {"head_dim": 60}, "head dims must be multiples of 8, got 60 and 64"),
    (MHA, ATTENTION, {"value_dim": 264}, "head dims must be at most 256, got 64 and 264"),
    (
        MHA,
        ATTENTION,
        {"more_queries": True, "square": False},
        "with more queries than keys, some rows attend to no key, and aiter's results for them are undefined",
    ),
    # mha_fwd
    (MHA, ATTENTION, {"grad": True}, "mha_fwd has no gradient"),
    (MHA, ATTENTION, {"softcap": True}, "mha_fwd has no softcap"),
    (
        MHA,
        ATTENTION,
        {**DECODE, "value_dim": 32},
        "mha_fwd regroups single queries only for equal head dims, got 64 and 32",
    ),
    (MHA, ATTENTION, {**DECODE, "sinks": True}, "mha_fwd regroups single queries without regrouping the sinks"),
    (MHA, ATTENTION, {"sinks": True}, f"mha_fwd of amd-aiter {WHEEL} has no argument `sink_ptr`", WHEEL),
    (MHA, ATTENTION, {}, f"amd-aiter {OLD} has no mha_fwd", OLD),
    (LSE, ATTENTION, {}, "it serves only calls with sinks"),
    # flash_attn_func
    (FLASH, ATTENTION, {"softcap": True}, "flash_attn_func has no softcap"),
    (
        FLASH,
        ATTENTION,
        {"sinks": True},
        "flash_attn_func may choose an assembly kernel, which would drop the sinks",
    ),
    (
        FLASH,
        ATTENTION,
        {"window": 1},
        "for a window of one key, flash_attn_func would choose an assembly kernel that has no windows",
    ),
    (
        FLASH,
        ATTENTION,
        {},
        "without gradients, flash_attn_func is faster only with assembly kernels (bf16, dim 128 or 192, no window)",
    ),
    (
        FLASH,
        ATTENTION,
        ASSEMBLY,
        f"flash_attn_func of amd-aiter {WHEEL} would choose gfx942's assembly kernel on gfx90a",
        WHEEL,
        "gfx90a",
    ),
    # flash_attn_varlen_func
    (DENSE, ATTENTION, {}, "flash_attn_varlen_func is used only with a softcap: without one, packing takes extra time"),
    (
        DENSE,
        ATTENTION,
        {"softcap": True, "sinks": True},
        "flash_attn_varlen_func may choose an assembly kernel, which would drop the sinks",
    ),
    (
        DENSE,
        ATTENTION,
        {"softcap": True, "grad": True},
        "the backward pass of flash_attn_varlen_func has no softcap",
    ),
    (
        DENSE,
        ATTENTION,
        {**ASSEMBLY, "softcap": True},
        f"flash_attn_varlen_func of amd-aiter {WHEEL} would choose an assembly kernel that drops the softcap",
        WHEEL,
    ),
    (
        PACKED,
        VARLEN,
        {"window": 1},
        "for a window of one key, flash_attn_varlen_func would choose an assembly kernel that has no windows",
    ),
    (
        PACKED,
        VARLEN,
        ASSEMBLY,
        "flash_attn_varlen_func of amd-aiter 0.1.15 would choose gfx942's assembly kernel on gfx90a",
        "0.1.15",
        "gfx90a",
    ),
    (PACKED, VARLEN, {"dtype": FP32}, "aiter's attention takes fp16 and bf16, not fp32"),
    (PACKED, VARLEN, {"lse": True}, "the call to flash_attn_varlen_func does not return the log-sum-exp"),
    # mha_fwd with lengths
    (decode.refuses, DECODING, {"grad": True}, "mha_fwd has no gradient"),
    (decode.refuses, DECODING, {"softcap": True}, "mha_fwd has no softcap"),
    (
        decode.refuses,
        DECODING,
        {"value_dim": 32},
        "mha_fwd regroups single queries only for equal head dims, got 64 and 32",
    ),
    (decode.refuses, DECODING, {"one_query": False}, "mha_fwd takes lengths only for single queries"),
    (decode.refuses, DECODING, {"starts": True}, "mha_fwd can't skip the first keys of a row"),
    (decode.refuses, DECODING, {"window": 8}, "mha_fwd can't skip the first keys of a row"),
    # aiter's Triton attention, which is for Radeon
    (triton.refuses, ATTENTION, {}, "on gfx942 aiter's compiled kernels are used instead"),
    (triton.refuses, ATTENTION, {"softcap": True}, "aiter's Triton attention has no softcap", NEWEST, "gfx1201"),
    (
        triton.refuses,
        ATTENTION,
        {"value_dim": 32},
        "aiter's Triton attention needs equal head dims, got 64 and 32",
        NEWEST,
        "gfx1201",
    ),
    (
        triton.refuses,
        ATTENTION,
        {"window": 4, "causal": False},
        "the windows of aiter's Triton attention are causal",
        NEWEST,
        "gfx1201",
    ),
    (
        triton.refuses,
        ATTENTION,
        {"sinks": True, "grad": True},
        "aiter's Triton attention is not used for the gradients of sinks",
        NEWEST,
        "gfx1151",
    ),
    (
        triton.refuses,
        ATTENTION,
        {"grad": True},
        "aiter has no tiles for the gradients of attention on gfx1201",
        NEWEST,
        "gfx1201",
    ),
    (
        triton.refuses,
        ATTENTION,
        {"head_dim": 192, "value_dim": 192},
        "on gfx1151 aiter's Triton attention would spill registers for head dims above 128",
        NEWEST,
        "gfx1151",
    ),
    (triton.refuses, ATTENTION, {"mask": BF16}, MASK, NEWEST, "gfx1201"),
    # linear
    (linear.refuses, LINEAR, {"grad": True}, "gemm_a16w16 has no gradient"),
    (linear.refuses, LINEAR, {"dtype": FP32}, "gemm_a16w16 supports fp16 and bf16, not torch.float32"),
    (
        linear.refuses,
        LINEAR,
        {"bias_dtype": FP32},
        "gemm_a16w16 needs one dtype, got torch.bfloat16, torch.bfloat16 and a bias of torch.float32",
    ),
    (linear.refuses, LINEAR, {"contiguous": False}, "gemm_a16w16 ignores strides, and the weight isn't contiguous"),
    (linear.refuses, LINEAR, {"k": 130}, "K must be a multiple of 8, got 130"),
    (linear.refuses, LINEAR, {}, f"amd-aiter {OLD} has no gemm_a16w16", OLD),
    (
        linear.shuffled_refuses,
        LINEAR,
        {},
        f"amd-aiter {WHEEL} does not check whether a weight is shuffled; use 0.1.7.post3 or later",
        WHEEL,
    ),
    (linear.shuffled_refuses, LINEAR, {}, "gfx90a has no kernel for shuffled weights", NEWEST, "gfx90a"),
    (
        linear.shuffled_refuses,
        LINEAR,
        {"n": 48},
        "on gfx950, shuffled weights must be bf16 with N and K multiples of 64, got torch.bfloat16, 48 × 128",
        NEWEST,
        "gfx950",
    ),
    # activation
    (activation.refuses, ACTIVATION, {"grad": True}, "silu_and_mul has no gradient"),
    (activation.refuses, ACTIVATION, {"dtype": FP32}, "silu_and_mul supports fp16 and bf16, not torch.float32"),
    (activation.refuses, ACTIVATION, {"dim": 63}, "silu_and_mul needs a dim that is a multiple of 8, got 63"),
    (activation.refuses, ACTIVATION, {}, f"amd-aiter {OLD} has no silu_and_mul", OLD),
    # norms
    (norm.refuses, NORM, {"grad": True}, "rms_norm has no gradient"),
    (norm.refuses, NORM, {"dtype": FP32}, "rms_norm supports fp16 and bf16, not torch.float32"),
    (norm.refuses, NORM, {"weight_dtype": FP32}, "rms_norm would read a weight of torch.float32 as torch.bfloat16"),
    (norm.refuses, NORM, {"dim": 63}, "rms_norm needs a dim that is a multiple of 8, got 63"),
    (norm.refuses, NORM, {"one_plus": True}, "amd-aiter 0.1.9 has no rmsnorm", "0.1.9"),
    (
        norm.refuses,
        NORM,
        {"one_plus": True},
        "rmsnorm of amd-aiter 0.1.16 has no argument `gemma_norm`",
        "0.1.16",
    ),
    (
        norm.refuses,
        NORM,
        {"one_plus": True, "dim": 16384},
        "rmsnorm has the (1 + w) form up to a dim of 8192, got 16384",
    ),
    (norm.add_refuses, NORM, {"grad": True}, "rms_norm has no gradient"),
    (
        norm.add_refuses,
        NORM,
        {"one_plus": True},
        "rmsnorm2d_fwd_with_add of amd-aiter 0.1.16 has no argument `gemma_norm`",
        "0.1.16",
    ),
    # rope
    (rope.refuses, ROPE, {"grad": True}, "aiter's RoPE returns the wrong number of gradients"),
    (rope.refuses, ROPE, {"dtype": FP32}, "aiter's RoPE supports fp16 and bf16, not torch.float32"),
    (rope.refuses, ROPE, {"angle_dtype": FP32}, "aiter's RoPE needs angles of torch.bfloat16, got torch.float32"),
    (rope.refuses, ROPE, {"shared": False}, "aiter's RoPE takes only one table of angles for the whole batch"),
    (
        rope.refuses,
        ROPE,
        {"rotated": 20},
        "aiter's RoPE needs a head dim and a number of rotated dims that are multiples of 8, got 64, of which 20 are "
        "rotated",
    ),
    (rope.refuses, ROPE, {}, f"amd-aiter {OLD} has no rope_cached_2c_fwd_impl", OLD),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[3])
def test_unsupported_calls_are_refused(recorded_as, case):
    refuses, spec, changes, sentence, *rest = case
    version, arch = (*rest, *(NEWEST, "gfx942")[len(rest) :])
    recorded_as(version, arch)
    assert refuses(spec._replace(**changes), Device("cuda", rocm=True, arch=arch)) == sentence
