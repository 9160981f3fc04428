"""Specifications of calls that the newest release of aiter serves, and the predicates of its attention kernels."""

from __future__ import annotations

import torch

from hf_rocm.ops.aiter import attention, varlen
from hf_rocm.ops.specs.attention import AttentionSpec, DecodeSpec, VarlenSpec
from hf_rocm.ops.specs.linear import LinearSpec
from hf_rocm.ops.specs.pointwise import ActivationSpec, NormSpec, RopeSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
NEWEST, WHEEL, OLD = "0.1.21.dev46", "0.1.7.post2.dev18", "0.1.6"

ATTENTION = AttentionSpec(
    dtype=BF16,
    device=CPU,
    heads=8,
    kv_heads=2,
    head_dim=64,
    value_dim=64,
    one_query=False,
    square=True,
    more_queries=False,
    causal=True,
    window=None,
    softcap=False,
    sinks=False,
    mask=None,
    grad=False,
    weights=False,
)
HEADS = {"dtype": BF16, "device": CPU, "heads": 8, "kv_heads": 2, "head_dim": 64, "value_dim": 64}
VARLEN = VarlenSpec(**HEADS, causal=True, window=None, softcap=False, sinks=False, grad=False)
DECODING = DecodeSpec(**HEADS, softcap=False, sinks=False, grad=False)
LINEAR = LinearSpec(
    dtype=BF16, weight_dtype=BF16, device=CPU, n=256, k=128, bias_dtype=None, contiguous=True, grad=False
)
ACTIVATION = ActivationSpec(dtype=BF16, device=CPU, dim=64, activation="silu", grad=False)
NORM = NormSpec(dtype=BF16, weight_dtype=BF16, device=CPU, dim=64, one_plus=False, grad=False)
ROPE = RopeSpec(
    dtype=BF16,
    angle_dtype=BF16,
    device=CPU,
    head_dim=64,
    rotated=64,
    interleaved=False,
    shared=True,
    grad=False,
)
ASSEMBLY = {"head_dim": 128, "value_dim": 128}
DECODE = {"one_query": True, "square": False}

MHA, LSE, FLASH = attention.mha_fwd_refuses, attention.mha_fwd_lse_refuses, attention.flash_attn_func_refuses
DENSE, PACKED = varlen.dense_refuses, varlen.packed_refuses
