"""gated_delta_step in the Triton kernels: several steps with states updated in place, views, odd sizes, refusals."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import delta as operation
from hf_rocm.ops.specs.delta import DeltaCall, DeltaSpec
from hf_rocm.ops.triton import delta as triton
from tests.amdgcn import suite
from tests.ops.test_delta import DTYPES, check, converted, drawn, eager
from tests.triton.routed import compiled_once, here, routed

SIZES = {
    "shared": {},
    "one each": {"shared": 1, "groups": 1, "batch": 1},
    "three value heads per key head": {"shared": 3, "groups": 2, "key_dim": 12, "value_dim": 20},
    "wide values": {"key_dim": 5, "value_dim": 33, "taps": 2},
    "wide keys": {"key_dim": 24, "value_dim": 16, "taps": 3},
    "contiguous": {"joined": False, "key_dim": 16, "value_dim": 16},
}


def step(*inputs, **keywords):
    return routed("gated_delta_step", *inputs, **keywords)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gated_delta_step(sizes, dtype):
    check(step, dtype, **sizes)


@pytest.mark.skipif(
    suite.gpu() is not None, reason="takes minutes as machine code; test_builds compiles a head dim of 128"
)
def test_heads_of_qwen3_next_are_as_accurate_as_the_eager_tier():
    check(step, torch.bfloat16, batch=1, groups=2, shared=2, key_dim=128, value_dim=128)


def test_states_may_be_views_of_wider_buffers():
    """The states are views of larger buffers, and the rest of the buffers does not change."""
    inputs, keywords = drawn(torch.bfloat16)
    expected = converted(keywords)
    output = step(*inputs, **expected)
    wide = {}
    for name in ("conv_state", "state"):
        buffer = torch.full((4, *keywords[name].shape[1:]), 7.0, dtype=keywords[name].dtype)
        buffer[1:3] = keywords[name]
        wide[name], keywords[name] = buffer, buffer[1:3]
    assert torch.equal(step(*inputs, **keywords), output)
    for name, buffer in wide.items():
        assert torch.equal(buffer[1:3], expected[name])
        assert (buffer[0] == 7).all() and (buffer[3] == 7).all()


def test_a_nan_stays_in_its_sequence_and_head():
    inputs, keywords = drawn(torch.float32)
    whole = step(*inputs, **converted(keywords))
    state = converted(keywords)
    state["state"][1, 4] = torch.nan
    out = step(*inputs, **state)
    assert out[1, 4].isnan().all() and state["state"][1, 4].isnan().all()
    out[1, 4] = whole[1, 4]
    assert torch.equal(out, whole)


@pytest.mark.parametrize("logit", [-60.0, -9.0, 60.0])
def test_large_and_small_decays_equal_the_eager_tier(logit):
    inputs, keywords = drawn(torch.float32)
    inputs[5] = torch.full_like(inputs[5], logit)
    keywords["bias"].zero_()
    fused, reference = converted(keywords), converted(keywords)
    out, expected = step(*inputs, **fused), eager(*inputs, **reference)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused["state"], reference["state"], rtol=1e-5, atol=1e-6)


def test_an_empty_batch_returns_an_empty_output():
    inputs, keywords = drawn(torch.float32, batch=0)
    assert step(*inputs, **keywords).shape == (0, 6, 6)


def specification(**changes):
    inputs, keywords = drawn(torch.bfloat16)
    return DeltaSpec(*operation.specification(DeltaCall(*inputs, **keywords)))._replace(**changes)


def test_unsupported_calls_are_refused():
    assert triton.refuses(specification(), here()) is None
    for words, changes in {
        "gradient": {"grad": True},
        "torch.float64": {"dtype": torch.float64},
        "with weights of torch.float64": {"weight_dtype": torch.float64},
        "in fp32, not torch.bfloat16": {"state_dtype": torch.bfloat16},
        "got 256 by 256": {"key_dim": 256, "value_dim": 256},
    }.items():
        assert words in triton.refuses(specification(**changes), here())
    inputs, keywords = drawn(torch.float32)
    keywords["norm_weight"].requires_grad_()
    with options.override(tier="triton"), pytest.raises(TierUnavailable, match="gated_delta_step"):
        ops.gated_delta_step(*inputs, **keywords)


def test_it_is_one_op_of_a_compiled_graph():
    inputs, keywords = drawn(torch.float32)

    def function(*inputs):
        terms = {name: value.clone() for name, value in keywords.items() if name != "eps"}
        return ops.gated_delta_step(*inputs, **terms, eps=1e-6)

    assert sum("triton_gated_delta_step" in node for node in compiled_once(function, *inputs)) == 1
