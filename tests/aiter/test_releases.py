"""Every recorded release of aiter: operations are called as the release declares them, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packaging.version import Version

from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.attention_eager import attention as eager_attention
from tests.aiter import recorded

BF16 = torch.bfloat16
# The first release that registers operators under their own names.
FIRST_SERVED = Version("0.1.6.post2")

every_release = pytest.mark.parametrize("version", recorded.RELEASES)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def run(operation, *arguments, family=None, **keywords):
    """Run an op in the aiter tier. Returns (outputs, kernel name, the call that reached aiter)."""
    del recorded.kernels.CALLS[:]
    with options.override(tiers={family or operation: "aiter"}, probe=False), ops.recording() as routes:
        outputs = getattr(ops, operation)(*arguments, **keywords)
    (call,) = recorded.kernels.CALLS
    return outputs, routes[0].name, call


def refusal(operation, *arguments, family=None, **keywords):
    """Return the message with which the aiter tier refuses a call."""
    with options.override(tiers={family or operation: "aiter"}, probe=False), pytest.raises(TierUnavailable) as caught:
        getattr(ops, operation)(*arguments, **keywords)
    return str(caught.value)


def served(version):
    return Version(version) >= FIRST_SERVED


@every_release
@pytest.mark.parametrize("form", ["prefill", "decode", "chunk", "window", "softcap", "sinks", "sinks, one query"])
def test_attention(recorded_as, version, form):
    recorded_as(version)
    s_q, s_k = {"decode": (1, 9), "chunk": (3, 9), "sinks, one query": (1, 9)}.get(form, (9, 9))
    query, key = random(2, 4, s_q, 32), random(2, 2, s_k, 32, seed=1)
    settings = {"scale": 0.3, "causal": True, "mask": None, "window": None, "softcap": None, "sinks": None}
    settings["window"] = 3 if form == "window" else None
    settings["softcap"] = 2.0 if form == "softcap" else None
    settings["sinks"] = random(4, seed=2) if form.startswith("sinks") else None
    if not served(version) and form != "softcap":
        assert "has no mha_fwd" in refusal("attention", query, key, key, **settings)
        return
    (output, _), name, call = run("attention", query, key, key, **settings)
    expected, _ = eager_attention(query.float(), key.float(), key.float(), **settings)
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)

    has_sinks = Version(version) >= Version("0.1.10")
    if form == "softcap":
        assert name == "flash_attn_varlen_func"
    elif form == "sinks":
        assert name == ("mha_fwd" if has_sinks else "mha_fwd, sinks by lse")
        assert ("sink_ptr" in call.arguments) is has_sinks
    elif form == "sinks, one query":
        assert name == "mha_fwd, sinks by lse"
    else:
        assert name == "mha_fwd"
    if call.kernel == "mha_fwd":
        assert ("sink_size" in call.arguments) is (Version(version) >= Version("0.1.8"))


@every_release
def test_flash_attn_func(recorded_as, version):
    recorded_as(version)
    query, key = random(2, 4, 9, 128), random(2, 2, 9, 128, seed=1)
    with options.override(tier="aiter", probe=False):
        (output, _), name, call = run("attention", query, key, key, scale=0.1, causal=True)
    assert name == "flash_attn_func" and call.arguments["window_size"] == (-1, -1)
    expected, _ = ops.attention(query.float(), key.float(), key.float(), scale=0.1, causal=True)
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


@every_release
@pytest.mark.parametrize("sinks", [False, True])
def test_decode_attention(recorded_as, version, sinks):
    recorded_as(version)
    query, key = random(2, 4, 1, 32), random(2, 2, 9, 32, seed=1)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    settings = {"scale": 0.3, "sinks": random(4, seed=2) if sinks else None}
    if not served(version):
        words = refusal("decode_attention", query, key, key, lengths, family="attention", **settings)
        assert "has no mha_fwd" in words
        return
    output, _, call = run("decode_attention", query, key, key, lengths, family="attention", **settings)
    with options.override(tier="eager"):
        expected = ops.decode_attention(query, key, key, lengths, **settings)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    assert "cu_seqlens_kv" in call.arguments and "sink_ptr" not in call.arguments


@every_release
@pytest.mark.parametrize("form", ["prefill", "decode", "window", "sinks"])
def test_radeon_attention_is_served_from_the_first_release_that_supports_it(recorded_as, version, form):
    recorded_as(version, "gfx1100")
    query, key = random(2, 4, 1 if form == "decode" else 9, 32), random(2, 2, 9, 32, seed=1)
    settings = {"scale": 0.3, "causal": True, "mask": None, "window": 3 if form == "window" else None, "softcap": None}
    settings["sinks"] = random(4, seed=2) if form == "sinks" else None
    if Version(version) < Version("0.1.19"):
        words = refusal("attention", query, key, key, **settings)
        assert f"aiter supports gfx1100 from 0.1.19 on, but this is amd-aiter {version}" in words
        return
    (output, _), name, _ = run("attention", query, key, key, **settings)
    assert name == "triton flash_attn_func"
    expected, _ = eager_attention(query.float(), key.float(), key.float(), **settings)
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


@every_release
def test_linear(recorded_as, version):
    recorded_as(version)
    x, weight, bias = random(3, 64), random(64, 64, seed=1), random(64, seed=2)
    if not served(version):
        assert "has no gemm_a16w16" in refusal("linear", x, weight, bias)
        return
    output, _, call = run("linear", x, weight, bias)
    torch.testing.assert_close(output, torch.nn.functional.linear(x, weight, bias), rtol=0.02, atol=0.05)
    assert (call.arguments["bias"] is None) is (Version(version) < recorded.READS_SHUFFLED)


@every_release
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_shuffled_linear(recorded_as, version, arch):
    recorded_as(version, arch)
    x, weight, bias = random(3, 64), random(64, 64, seed=1), random(64, seed=2)
    shuffled = ops.shuffle(weight)
    if not served(version):
        assert "has no gemm_a16w16" in refusal("shuffled_linear", x, shuffled, bias, family="linear")
    elif Version(version) < recorded.READS_SHUFFLED:
        assert "does not check whether a weight is shuffled" in refusal(
            "shuffled_linear", x, shuffled, bias, family="linear"
        )
    else:
        output, _, call = run("shuffled_linear", x, shuffled, bias, family="linear")
        torch.testing.assert_close(output, torch.nn.functional.linear(x, weight, bias), rtol=0.02, atol=0.05)
        assert call.arguments["B"].is_shuffled is True and not hasattr(shuffled.data, "is_shuffled")


@every_release
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("with_add", [False, True])
def test_norms_are_served_or_refused_with_a_reason(recorded_as, version, one_plus, with_add):
    recorded_as(version)
    x, residual, weight = random(2, 3, 16), random(2, 3, 16, seed=1), random(16, seed=2)
    operation, inputs = ("add_rms_norm", (x, residual)) if with_add else ("rms_norm", (x,))
    settings = {"eps": 1e-6, "one_plus": one_plus, "family": "rms_norm"}
    if (one_plus and Version(version) < Version("0.1.17")) or (not served(version) and not with_add):
        words = refusal(operation, *inputs, weight, **settings)
        assert "has no argument `gemma_norm`" in words or "has no r" in words
        return
    if not served(version):
        assert "has no rmsnorm2d_fwd_with_add" in refusal(operation, *inputs, weight, **settings)
        return
    outputs, _, call = run(operation, *inputs, weight, **settings)
    with options.override(tier="eager"):
        expected = getattr(ops, operation)(*inputs, weight, eps=1e-6, one_plus=one_plus)
    torch.testing.assert_close(outputs, expected, rtol=0.02, atol=0.02)
    assert call.arguments.get("gemma_norm", False) is one_plus


@every_release
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_and_mul(recorded_as, version, activation):
    recorded_as(version)
    x = random(2, 3, 32)
    if not served(version):
        assert f"has no {activation}_and_mul" in refusal("act_and_mul", x, activation=activation)
        return
    output, _, _ = run("act_and_mul", x, activation=activation)
    with options.override(tier="eager"):
        torch.testing.assert_close(output, ops.act_and_mul(x, activation=activation), rtol=0.02, atol=0.02)


@every_release
def test_rope(recorded_as, version):
    recorded_as(version)
    query, key, angles = random(2, 4, 5, 16), random(2, 2, 5, 16, seed=1), random(1, 5, 16, seed=2)
    if not served(version):
        assert "has no rope_cached_2c_fwd_impl" in refusal("rope", query, key, angles, angles)
        return
    outputs, _, _ = run("rope", query, key, angles, angles)
    with options.override(tier="eager"):
        expected = ops.rope(query, key, angles, angles)
    torch.testing.assert_close(outputs, expected, rtol=0.02, atol=0.05)


def test_the_recorded_wheel_is_the_installed_one(kernels):
    """The recorded declarations of the release on PyPI equal those of the installed package."""
    from hf_rocm.ops.aiter import detect

    installed = detect.release()
    data = recorded.release(str(installed.version))
    for kind in ("operators", "functions"):
        for name in recorded.DATA[kind]:
            attribute = "operator" if kind == "operators" else "function"
            expected = getattr(data, attribute)(name)
            if expected is not None:
                declared = getattr(installed, attribute)(name)
                assert declared is not None and declared.arguments == expected.arguments, name


def test_the_sources_of_the_wheel_match_the_record():
    """Reading the sources of the installed wheel, as for a checkout, returns the recorded declarations."""
    from importlib.util import find_spec

    from tests.aiter import record

    spec = find_spec("aiter")
    if spec is None or spec.origin is None:
        pytest.skip("not run: needs amd-aiter")
    checkout = Path(spec.origin).parents[1]
    assert record.differences(checkout, "0.1.7.post2.dev18") == []
    assert any("mha_fwd" in difference for difference in record.differences(checkout, recorded.RELEASES[-1]))
