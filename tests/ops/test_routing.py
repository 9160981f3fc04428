"""choose_experts in PyTorch: the torch tier equals the eager tier, which selects the lower index among equal scores."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import OptionError
from hf_rocm.ops import routing_torch as routing
from tests.tolerance import assert_as_good_as_eager

FORMS = {
    "softmax": {"top": 3},
    "normalised": {"top": 4, "normalise": True},
    "wide": {"top": 2, "normalise": True, "dtype": torch.float32},
    "chosen": {"top": 4, "scores": routing.CHOSEN},
    "one": {"top": 1, "scores": routing.CHOSEN},
    "all": {"top": 16, "normalise": True},
    "sigmoid": {"top": 3, "scores": routing.SIGMOID, "biased": True, "normalise": True, "epsilon": 1e-20, "scale": 2.5},
    "groups": {
        "top": 4,
        "scores": routing.SIGMOID,
        "biased": True,
        "groups": 4,
        "chosen_groups": 2,
        "normalise": True,
        "epsilon": 1e-20,
        "scale": 1.5,
        "dtype": torch.float32,
    },
    "best of groups": {"top": 3, "groups": 8, "chosen_groups": 3, "best": 1, "scale": 16.0},
}


def drawn(tokens, form, dtype, *, experts=16, seed=0):
    """Returns (logits, keywords). Every token has distinct logits in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(-1)
    keywords = dict(form)
    if keywords.pop("biased", False):
        keywords["bias"] = torch.rand(experts, generator=generator) * 0.3
    return ((order - experts / 2) * (8.0 / experts)).to(dtype), keywords


def eager(logits, keywords):
    with options.override(tiers={"experts": "eager"}):
        return ops.choose_experts(logits, **keywords)


def reference(logits, keywords):
    return eager(logits.double(), {**keywords, "dtype": torch.float64})


def check(actual, logits, keywords):
    """Check that the experts are equal, and that the weights are within the derived tolerance."""
    (weights, ids), (expected, expected_ids) = eager(logits, keywords), reference(logits, keywords)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(actual[1].sort().values, expected_ids.sort().values)
    order, expected_order = actual[1].argsort(-1), expected_ids.argsort(-1)
    aligned = actual[0].gather(1, order), weights.gather(1, expected_order), expected.gather(1, expected_order)
    assert_as_good_as_eager(*aligned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_torch_tier_equals_the_oracle(form, dtype):
    logits, keywords = drawn(5, form, dtype)
    with options.override(tiers={"experts": "torch"}), ops.recording() as routes:
        actual = ops.choose_experts(logits, **keywords)
    assert [(route.operation, route.tier, route.shapes) for route in routes] == [
        ("choose_experts", "torch", ((5, 16),))
    ]
    assert actual[0].dtype == keywords.get("dtype", dtype) and actual[1].dtype == torch.int64
    check(actual, logits, keywords)


def test_the_oracle_equals_a_manual_example():
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0]])
    weights, ids = eager(logits, {"top": 2, "normalise": True})
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[0.5, 0.5]]
    weights, ids = eager(logits, {"top": 1, "scores": routing.SIGMOID, "bias": torch.tensor([1.0, 0.0, 0.0, 0.0])})
    assert ids.tolist() == [[0]] and weights.tolist() == [[0.5]]
    # the second group has the best pair, but not the best expert
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    weights, ids = eager(logits, {"top": 1, "scores": routing.SIGMOID, "groups": 2, "chosen_groups": 1})
    assert ids.tolist() == [[2]] and weights.item() == torch.tensor(2.0).sigmoid().item()


def test_unknown_scores_are_refused():
    with pytest.raises(OptionError, match="does not support scores='tanh'"):
        ops.choose_experts(torch.zeros(1, 4), top=1, scores="tanh")


def test_gradients_reach_the_logits():
    logits = torch.randn(3, 8, requires_grad=True)
    ops.choose_experts(logits, top=2, normalise=True)[0].square().sum().backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0
