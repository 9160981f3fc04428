"""Every refusal of the aiter tier, by its sentence in `explain`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from packaging.version import Version

from hf_rocm import options
from hf_rocm.architectures import NEWEST_AITER
from hf_rocm.device import Device
from hf_rocm.ops.aiter import activation, attention, contract, decode, detect, linear, norm, rope, triton, varlen
from hf_rocm.ops.aiter.detect import Argument, Function, Release
from hf_rocm.ops.attention import AttentionSpec
from hf_rocm.ops.decode import DecodeSpec
from hf_rocm.ops.linear import LinearSpec
from hf_rocm.ops.pointwise import ActivationSpec, NormSpec, RopeSpec
from hf_rocm.ops.varlen import VarlenSpec
from tests.aiter import recorded

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

MASK = "aiter takes no mask for each batch row, only one [S_q, S_k] bias"

CASES = [
    # refused by every attention kernel
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
        "with more queries than keys some rows see no key, for which the result of aiter's kernels is undefined",
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
    (LSE, ATTENTION, {}, "it serves calls with sinks only"),
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
        "flash_attn_func would choose an assembly kernel without windows for a window of one key",
    ),
    (
        FLASH,
        ATTENTION,
        {},
        "without gradients it is faster only with its assembly kernels (bf16, head dim 128, no window)",
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
    (DENSE, ATTENTION, {}, "flash_attn_varlen_func is used for a softcap only: without one, packing takes extra time"),
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
        "flash_attn_varlen_func would choose an assembly kernel without windows for a window of one key",
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
    # mha_fwd with lengths
    (decode.refuses, DECODING, {"grad": True}, "mha_fwd has no gradient"),
    (decode.refuses, DECODING, {"softcap": True}, "mha_fwd has no softcap"),
    (
        decode.refuses,
        DECODING,
        {"value_dim": 32},
        "mha_fwd regroups single queries only for equal head dims, got 64 and 32",
    ),
    (decode.refuses, DECODING, {"one_query": False}, "mha_fwd takes lengths for single queries only"),
    (decode.refuses, DECODING, {"starts": True}, "mha_fwd can't skip the first keys of a row"),
    (decode.refuses, DECODING, {"window": 8}, "mha_fwd can't skip the first keys of a row"),
    # Radeon
    (triton.refuses, ATTENTION, {}, "on gfx942 aiter's compiled kernels come first"),
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
        f"amd-aiter {WHEEL} ignores that a weight is shuffled; 0.1.7.post3 is the first that doesn't",
        WHEEL,
    ),
    (linear.shuffled_refuses, LINEAR, {}, "gfx90a has no kernel for shuffled weights", NEWEST, "gfx90a"),
    (
        linear.shuffled_refuses,
        LINEAR,
        {"n": 48},
        "on gfx950 shuffled weights must be bf16 with N and K multiples of 64, got torch.bfloat16, 48 × 128",
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
    (rope.refuses, ROPE, {"grad": True}, "aiter's RoPE returns a wrong number of gradients"),
    (rope.refuses, ROPE, {"dtype": FP32}, "aiter's RoPE supports fp16 and bf16, not torch.float32"),
    (rope.refuses, ROPE, {"angle_dtype": FP32}, "aiter's RoPE needs angles of torch.bfloat16, got torch.float32"),
    (rope.refuses, ROPE, {"shared": False}, "aiter's RoPE takes only one table of angles for the whole batch"),
    (rope.refuses, ROPE, {"rotated": 20}, "aiter's RoPE needs dims that are multiples of 8, got 20 of 64"),
    (rope.refuses, ROPE, {}, f"amd-aiter {OLD} has no rope_cached_2c_fwd_impl", OLD),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[3])
def test_refusals(recorded_as, case):
    refuses, spec, changes, sentence, *where = case
    version, arch = (*where, *(NEWEST, "gfx942")[len(where) :])
    recorded_as(version, arch)
    assert refuses(spec._replace(**changes), Device("cuda", rocm=True, arch=arch)) == sentence


@pytest.mark.parametrize(
    ("refuses", "spec"),
    [
        (MHA, ATTENTION),
        (MHA, ATTENTION._replace(sinks=True)),
        (MHA, ATTENTION._replace(**DECODE)),
        (MHA, ATTENTION._replace(more_queries=True, square=False, causal=False)),
        (LSE, ATTENTION._replace(sinks=True, **DECODE)),
        (FLASH, ATTENTION._replace(**ASSEMBLY)),
        (FLASH, ATTENTION._replace(grad=True, window=4)),
        (DENSE, ATTENTION._replace(softcap=True, **ASSEMBLY)),
        (PACKED, VARLEN),
        (decode.refuses, DECODING),
        (decode.refuses, DECODING._replace(sinks=True)),
        (linear.refuses, LINEAR),
        (linear.shuffled_refuses, LINEAR),
        (activation.refuses, ACTIVATION),
        (norm.refuses, NORM),
        (norm.refuses, NORM._replace(one_plus=True)),
        (norm.add_refuses, NORM._replace(one_plus=True)),
        (rope.refuses, ROPE),
    ],
)
def test_the_newest_release_serves(recorded_as, refuses, spec):
    recorded_as(NEWEST)
    assert refuses(spec, Device("cuda", rocm=True, arch="gfx942")) is None


COMPILED = [MHA, LSE, FLASH, DENSE, PACKED, decode.refuses, linear.refuses, linear.shuffled_refuses]
PORTABLE = [activation.refuses, norm.refuses, norm.add_refuses, rope.refuses, triton.refuses]


@pytest.mark.parametrize("refuses", COMPILED + PORTABLE)
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        (Device("cpu", rocm=False), "aiter needs an AMD GPU under ROCm, and this is the CPU"),
        (Device("cuda", rocm=False), "aiter needs an AMD GPU under ROCm, and this is a cuda device without it"),
    ],
)
def test_unsupported_devices(recorded_as, refuses, device, sentence):
    recorded_as(NEWEST)
    assert refuses(None, device) == sentence


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1030", "gfx1250"])
@pytest.mark.parametrize("refuses", COMPILED)
def test_compiled_kernels_are_for_instinct(recorded_as, refuses, arch):
    recorded_as(NEWEST)
    sentence = f"this kernel of aiter is for gfx90a, gfx942, gfx950, not for {arch}"
    assert refuses(None, Device("cuda", rocm=True, arch=arch)) == sentence


@pytest.mark.parametrize("refuses", PORTABLE)
def test_portable_kernels_are_for_listed_radeons_too(recorded_as, refuses):
    recorded_as("0.1.18")
    sentence = "aiter supports gfx1151 from 0.1.19 on, and this is amd-aiter 0.1.18"
    assert refuses(None, Device("cuda", rocm=True, arch="gfx1151")) == sentence
    sentence = "this kernel of aiter is for gfx90a, gfx942, gfx950, gfx1100, gfx1151, gfx1201, not for gfx1030"
    assert refuses(None, Device("cuda", rocm=True, arch="gfx1030")) == sentence


@pytest.mark.parametrize(
    ("refuses", "spec"),
    [
        (activation.refuses, ACTIVATION),
        (norm.refuses, NORM),
        (norm.add_refuses, NORM),
        (rope.refuses, ROPE),
        (triton.refuses, ATTENTION),
        (triton.refuses, ATTENTION._replace(window=4, sinks=True)),
        (triton.refuses, ATTENTION._replace(head_dim=256, value_dim=256)),
    ],
)
def test_the_newest_release_serves_radeon(recorded_as, refuses, spec):
    recorded_as(NEWEST, "gfx1201")
    assert refuses(spec, Device("cuda", rocm=True, arch="gfx1201")) is None


def test_attention_gradients_on_the_radeon_that_supports_them(recorded_as):
    recorded_as(NEWEST, "gfx1151")
    assert triton.refuses(ATTENTION._replace(grad=True), Device("cuda", rocm=True, arch="gfx1151")) is None


@pytest.mark.parametrize(
    ("release", "newer"),
    [
        ("0.1.7.post2.dev18", False),
        ("0.1.20.post1+rocm7.2", False),
        (f"{NEWEST}+ge4048607a5", False),
        ("0.1.21", True),
        ("0.1.22+rocm7.2", True),
        (None, False),
    ],
)
def test_an_unchecked_release_is_used_if_aiter_is_named(recorded_as, monkeypatch, release, newer):
    assert recorded.RELEASES[-1] == NEWEST_AITER == NEWEST
    recorded_as(NEWEST)
    unchecked = dataclasses.replace(recorded.release(NEWEST), version=Version(release) if release else None)
    monkeypatch.setattr(detect, "load", lambda: unchecked)
    device = Device("cuda", rocm=True, arch="gfx942")
    sentence = f"amd-aiter {release} is newer than {NEWEST}, the last release that hf_rocm's calls were checked with "
    assert (detect.unavailable(device) or "").startswith(sentence) is newer
    with options.override(tier="aiter"):
        assert detect.unavailable(device) is None
    with options.override(aiter={**options.current().aiter, "gemm": options.Switch.REQUIRED}):
        assert detect.unavailable(device) is None


def test_decode_without_mamba_states_uses_hf_rocms_decode_kernel(recorded_as, monkeypatch):
    recorded_as(NEWEST)
    device = Device("cuda", rocm=True, arch="gfx942")
    monkeypatch.setattr(decode.split, "refuses", lambda spec, device: None)
    assert "splits the keys" in decode.refuses(DECODING, device)
    assert decode.refuses(DECODING._replace(ends=True), device) is None
    with options.override(tier="aiter"):
        assert decode.refuses(DECODING, device) is None
    with options.override(aiter={**options.current().aiter, "attention": options.Switch.REQUIRED}):
        assert decode.refuses(DECODING, device) is None


def test_an_unknown_required_argument(monkeypatch):
    """A future release inserts a required argument: the call is refused."""
    arguments = (Argument("A", True), Argument("B", True), Argument("swizzle", True), Argument("bias", False))
    arguments += (Argument("otype", False),)
    release = Release(None, lambda name: Function(print, arguments), lambda name: None)
    monkeypatch.setattr(detect, "load", lambda: release)
    sentence = "gemm_a16w16 of this amd-aiter requires `swizzle`, which hf_rocm doesn't know"
    assert linear.refuses(LINEAR, Device("cuda", rocm=True, arch="gfx942")) == sentence


def test_neutral_values_are_passed_only_if_required(monkeypatch):
    given = []

    def kernel(**keywords):
        given.append(keywords)

    arguments = (Argument("a", True), Argument("size", True), Argument("spare", False))
    monkeypatch.setattr(
        detect, "load", lambda: Release(None, lambda name: Function(kernel, arguments), lambda name: None)
    )
    call = contract.operator("any", frozenset("a"), {"size": 0, "spare": 1, "gone": 2})
    call(a=5)
    assert given == [{"a": 5, "size": 0}]
