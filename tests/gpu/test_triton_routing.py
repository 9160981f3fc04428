"""The Triton kernel selects the same experts as torch.topk on a GPU, even with equal scores and in a graph."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops import routing_torch as routing
from tests.ops.test_routing import FORMS, check, drawn

pytestmark = pytest.mark.gpu

SIZES = [(8, 2), (32, 4), (60, 4), (64, 8), (128, 8), (256, 8), (512, 10)]  # (E, k)


@pytest.fixture(autouse=True)
def unprobed():
    pytest.importorskip("triton", reason="not run: needs Triton")
    with options.override(probe=False), torch.no_grad():
        yield


def routed(tier, logits, **keywords):
    with options.override(tiers={"experts": tier}), ops.recording() as routes:
        output = ops.choose_experts(logits, **keywords)
    assert [route.tier for route in routes] == [tier]
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_choose_experts(form, dtype):
    logits, keywords = drawn(65, form, dtype)
    moved = {key: tensor.cuda() if isinstance(tensor, torch.Tensor) else tensor for key, tensor in keywords.items()}
    check(routed("triton", logits.cuda(), **moved), logits.cuda(), moved)


@pytest.mark.parametrize("scores", routing.SCORES)
@pytest.mark.parametrize(("experts", "top"), SIZES)
def test_the_experts_equal_those_of_topk_even_with_equal_scores(experts, top, scores):
    """The logits are rounded to bf16, like those of a GEMM, so some tokens have equal scores at ranks k and k + 1. With
    the largest spread, they are also rounded to multiples of 1/8: with 512 experts, about 40 % of the tokens have ties.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    for spread in (0.01, 0.5, 3.0):
        logits = (torch.randn(2048, experts, generator=generator, device="cuda") * spread).bfloat16()
        logits = (logits * 8).round() / 8 if spread > 1 else logits
        (weights, ids), (expected, expected_ids) = (
            routed(tier, logits, top=top, scores=scores) for tier in ("triton", "torch")
        )
        assert torch.equal(ids.sort(-1).values, expected_ids.sort(-1).values)
        torch.testing.assert_close(weights.sort(-1).values, expected.sort(-1).values, rtol=2**-7, atol=0)


def test_groups_with_equal_scores_are_chosen_as_by_topk():
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(2048, 256, generator=generator, device="cuda").mul(4).round().div(4)
    form = {"top": 8, "scores": "sigmoid", "groups": 8, "chosen_groups": 4, "bias": torch.zeros(256, device="cuda")}
    actual, expected = (routed(tier, logits, **form)[1].sort(-1).values for tier in ("triton", "torch"))
    assert torch.equal(actual, expected)


def test_a_replay_uses_the_current_logits():
    logits, keywords = drawn(8, FORMS["normalised"], torch.bfloat16, experts=128)
    logits = logits.cuda()
    ops.choose_experts(logits, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = ops.choose_experts(logits, **keywords)
    logits.copy_(logits.flip(1))
    graph.replay()
    expected = ops.choose_experts(logits, **keywords)
    assert torch.equal(weights, expected[0]) and torch.equal(ids, expected[1])


def test_the_kernel_is_checked_in_a_child_process():
    with options.override(tiers={"experts": "triton"}, probe=True, refresh=True), ops.recording() as routes:
        ops.choose_experts(torch.randn(2, 128, device="cuda").bfloat16(), top=8, normalise=True)
    assert [route.name for route in routes] == ["routing_kernel"]
