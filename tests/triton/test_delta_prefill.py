"""gated_delta_prefill in the Triton kernels: chunks, tails, states, views, odd sizes, extreme values, and refusals."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import delta_prefill
from hf_rocm.ops.specs.delta import DeltaSpec, PrefillCall
from hf_rocm.ops.triton import delta_prefill as triton
from tests.amdgcn import suite
from tests.ops.test_delta_prefill import DTYPES, HARD, check, drawn, hard
from tests.triton.routed import compiled_once, here, routed

SMALL = {"batch": 1, "groups": 1, "shared": 1}
SIZES = {
    "one token": {"length": 1, **SMALL},
    "two chunks": {"length": 37, "shared": 2, "batch": 1, "groups": 2},
    "fresh": {"length": 33, "fresh": True, **SMALL},
    "shorter than the taps": {"length": 2, "fresh": True, "batch": 2, "groups": 1},
    "three value heads per key head": {"length": 65, **SMALL, "shared": 3, "key_dim": 20, "value_dim": 40},
    "one block of keys": {"length": 33, "key_dim": 24, **SMALL},
    "two taps": {"length": 16, "taps": 2, "batch": 2, "groups": 1, "shared": 1},
    "contiguous": {"length": 5, "joined": False, **SMALL, "key_dim": 72, "value_dim": 16},
}


def prefill(*inputs, **keywords):
    return routed("gated_delta_prefill", *inputs, **keywords)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gated_delta_prefill(sizes, dtype):
    check(prefill, *drawn(dtype, **sizes))


@pytest.mark.parametrize("values", HARD.values(), ids=HARD)
def test_extreme_values_are_as_accurate_as_the_eager_tier(values):
    check(prefill, *hard(torch.float32, values, length=40, **SMALL))


@pytest.mark.skipif(
    suite.gpu() is not None,
    reason="interpreting the machine code takes minutes; test_builds compiles a head dim of 128",
)
@pytest.mark.parametrize("key_dim", [128, 256])
def test_wide_heads_are_supported(key_dim):
    check(prefill, *drawn(torch.bfloat16, length=66, **SMALL, key_dim=key_dim, value_dim=128))


def test_states_may_be_views_of_wider_buffers():
    """The states are views of buffers with a larger batch dim, and are not modified."""
    inputs, keywords = drawn(torch.bfloat16, length=34, groups=1, shared=1)
    expected = prefill(*inputs, **keywords)
    for name in ("conv_state", "state"):
        buffer = torch.full((4, *keywords[name].shape[1:]), 7.0, dtype=keywords[name].dtype)
        buffer[1:3] = keywords[name]
        keywords[name] = buffer[1:3]
    before = {name: keywords[name].clone() for name in ("conv_state", "state")}
    for one, other in zip(prefill(*inputs, **keywords), expected, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(keywords[name], value) for name, value in before.items())


def test_a_nan_stays_in_its_sequence_and_head():
    inputs, keywords = drawn(torch.float32, length=33, groups=1, value_dim=16)
    whole = prefill(*inputs, **keywords)
    keywords["state"] = keywords["state"].clone()
    keywords["state"][1, 1] = torch.nan
    out, _, state = prefill(*inputs, **keywords)
    assert out[1, :, 1].isnan().all() and state[1, 1].isnan().all()
    out[1, :, 1], state[1, 1] = whole[0][1, :, 1], whole[2][1, 1]
    assert torch.equal(out, whole[0]) and torch.equal(state, whole[2])


@pytest.mark.parametrize("empty", [{"length": 0}, {"length": 3, "batch": 0}])
@pytest.mark.parametrize("fresh", [True, False])
def test_without_tokens_the_states_are_unchanged(fresh, empty):
    inputs, keywords = drawn(torch.float32, fresh=fresh, **empty)
    out, conv_state, state = prefill(*inputs, **keywords)
    assert out.numel() == 0
    assert torch.equal(conv_state, keywords.get("conv_state", torch.zeros_like(conv_state)))
    assert torch.equal(state, keywords.get("state", torch.zeros_like(state)))


def specification(**changes):
    inputs, keywords = drawn(torch.bfloat16, length=3)
    call = PrefillCall(*inputs, **keywords)
    return DeltaSpec(*delta_prefill.specification(call))._replace(**changes)


def test_unsupported_calls_are_refused():
    assert triton.refuses(specification(value_dim=512), here()) is None
    for words, changes in {
        "gradient": {"grad": True},
        "torch.float64": {"dtype": torch.float64},
        "with weights of torch.float64": {"weight_dtype": torch.float64},
        "in fp32, not torch.bfloat16": {"state_dtype": torch.bfloat16},
        "up to 256 for prompts, got 257": {"key_dim": 257},
    }.items():
        assert words in triton.refuses(specification(**changes), here())
    inputs, keywords = drawn(torch.float32, length=3)
    keywords["norm_weight"].requires_grad_()
    with options.override(tier="triton"), pytest.raises(TierUnavailable, match="gated_delta_prefill"):
        ops.gated_delta_prefill(*inputs, **keywords)


def test_it_is_one_op_of_a_compiled_graph():
    inputs, keywords = drawn(torch.float32, length=3, **SMALL)
    del keywords["eps"]

    def function(*inputs):
        return ops.gated_delta_prefill(*inputs, **keywords, eps=1e-6)[0]

    assert sum("triton_gated_delta_prefill" in node for node in compiled_once(function, *inputs)) == 1
