"""choose_experts in the Triton kernel: every variant, equal scores, NaN, and refusals."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import routing, routing_torch
from hf_rocm.ops.specs.experts import RoutingSpec
from hf_rocm.ops.triton import routing as triton
from tests.amdgcn import suite
from tests.ops.test_routing import FORMS, check, drawn, eager
from tests.triton.routed import compiled_once, here, routed

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@every_dtype
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_choose_experts(form, dtype):
    for tokens, seed, spread in (3, 0, 1), (17, 1, 0.25), (5, 2, 0.5):
        logits, keywords = drawn(tokens, form, dtype, seed=seed)
        logits *= spread
        actual = routed("choose_experts", logits, **keywords)
        assert torch.equal(actual[1], eager(logits, keywords)[1]), "the largest score is not first"
        check(actual, logits, keywords)
    # Every row has one large score.
    weights, ids = routed("choose_experts", torch.eye(16, dtype=dtype) * 1000, **keywords)
    assert torch.equal(ids[:, 0], torch.arange(16)) and weights.isfinite().all()
    # A NaN affects only its row, and counts as the largest score.
    for first in range(0 if suite.gpu() is None else 3):
        mask = torch.arange(tokens) % 3 == first
        broken = logits.masked_fill(mask[:, None] & (torch.arange(16) == 5 * first), torch.nan)
        weights, ids = routed("choose_experts", broken, **keywords)
        assert torch.equal(weights[~mask], actual[0][~mask]) and torch.equal(ids[~mask], actual[1][~mask])
        if keywords.get("scores") == routing_torch.SIGMOID:
            assert torch.equal(ids[mask].sort().values, eager(broken, keywords)[1][mask].sort().values)
            # Scores of 0 are the lowest.
            excluded = torch.arange(16) % 4 == first
            changed = {**keywords, "bias": keywords["bias"].masked_fill(excluded, 0)}
            broken = logits.masked_fill(excluded, -torch.inf)
            ids = routed("choose_experts", broken, **changed)[1]
            assert torch.equal(ids.sort().values, eager(broken, changed)[1].sort().values)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(("experts", "top"), [(1, 1), (3, 2), (60, 4), (63, 8), (128, 8), (300, 10)])
def test_every_number_of_experts_is_supported(experts, top, tokens):
    for seed in range(3):
        logits, keywords = drawn(tokens, {"top": top, "normalise": True}, torch.float32, experts=experts, seed=seed)
        actual = routed("choose_experts", logits, **keywords)
        if tokens:
            check(actual, logits, keywords)
        else:
            assert actual[0].shape == actual[1].shape == (0, top)


@pytest.mark.parametrize("scores", routing_torch.SCORES)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_with_equal_scores_the_lower_experts_are_selected(scores, steps):
    """torch.topk does the same on a GPU; tests/gpu compares the two."""
    logits = torch.randint(steps, (7, 37), generator=torch.Generator().manual_seed(steps)).bfloat16() / 4
    ids = routed("choose_experts", logits, top=5, scores=scores)[1]
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :5])


def test_with_equal_scores_the_lower_groups_are_selected():
    ids = routed("choose_experts", torch.zeros(2, 16), top=5, scores="sigmoid", groups=4, chosen_groups=2)[1]
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("scores", routing_torch.SCORES)
def test_for_any_logits_the_experts_are_valid_and_distinct(scores):
    logits = torch.tensor([[float("nan")] * 5, [float("-inf")] * 5, [float("inf")] * 5, [0.0, float("nan"), 1, 2, 3]])
    weights, ids = routed("choose_experts", logits, top=3, scores=scores)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in ids.tolist())
    assert weights[0].isnan().all() and weights[3].isnan().any()
    usual, keywords = drawn(4, {"top": 3, "scores": scores}, torch.float32, experts=5)
    # The same variant with ordinary scores.
    check(routed("choose_experts", usual, **keywords), usual, keywords)
    # The scores of the logits below are all 1 in fp32.
    if scores == routing_torch.SIGMOID:
        ids = routed("choose_experts", torch.tensor([[17.0, 20.0, 18.0, 17.1, 30.0]]), top=3, scores=scores)[1]
        assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grad": True}, "no gradient"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"experts": 2000}, "of 2000"),
        ({"top_k": 33}, "33 of 64"),
        ({"top_k": 0}, "can't be chosen"),
        ({"biased": True, "scores": routing_torch.CHOSEN}, "no bias to logits"),
        ({"groups": 8, "scores": routing_torch.CHOSEN}, "softmax or sigmoid scores"),
        ({"groups": 7}, "groups of 64 experts can't be chosen"),
        ({"groups": 8, "chosen_groups": 9}, "9 of 8 groups"),
        ({"groups": 3, "experts": 48}, "powers of two"),
        ({"groups": 8, "best": 3}, "best one or two"),
        ({"groups": 32, "chosen_groups": 2}, "fewer than 8"),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused(change, reason):
    spec = RoutingSpec(*routing.specification_for(torch.zeros(1, 64), experts=64, wide=False, top=8))
    assert triton.refuses(spec, here()) is None
    assert reason in str(triton.refuses(spec._replace(**change), here()))


def test_gradients_are_refused_when_the_tier_is_named():
    with pytest.raises(TierUnavailable, match="gradient"):
        routed("choose_experts", torch.zeros(1, 4, requires_grad=True), top=1)


def test_it_is_one_op_of_a_compiled_graph():
    logits, keywords = drawn(2, FORMS["groups"], torch.float32)
    nodes = compiled_once(lambda logits: ops.choose_experts(logits, **keywords)[0] * 2, logits)
    assert "hf_rocm.triton_choose_experts.default" in nodes


def test_the_custom_op_passes_opcheck():
    arguments = (torch.randn(2, 8), None, 2, "softmax", 1, 1, 2, True, 0.0, 1.0, torch.float32)
    checks = ("test_schema", "test_faketensor")
    operator = torch.ops.hf_rocm.triton_choose_experts.default
    torch.library.opcheck(operator, arguments, test_utils=checks)
    # exp(1000) would overflow.
    weights, ids = operator(torch.eye(8) * 1000, *arguments[1:])
    assert torch.equal(ids[:, 0], torch.arange(8)) and weights.tolist() == [[1.0, 0.0]] * 8
