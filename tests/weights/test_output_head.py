"""The output head of a prepared model runs in the kernel for few rows, unless user code has changed the head."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.tools.explanation import HEAD
from hf_rocm.weights.instance_forward import is_attached
from hf_rocm.weights.linear_hook import BACKEND, FEW_ROWS
from tests.weights.models import IDS, build


class Quantised(nn.Linear):
    """A stand-in for a quantised layer, or for any other subclass of `nn.Linear`."""


def test_prepare_routes_the_output_head_and_restore_undoes_it():
    model = build()
    with torch.no_grad():
        expected = model(IDS).logits
        hf_rocm.prepare(model, force=True)
        assert is_attached(model.lm_head) and model.lm_head.__dict__[BACKEND] == FEW_ROWS
        torch.testing.assert_close(model(IDS).logits, expected)
        assert HEAD in hf_rocm.explain(model).linears
        copied = copy.deepcopy(model)
        hf_rocm.restore(model)
        assert is_attached(copied.lm_head) and not is_attached(model.lm_head)
        assert not [name for name in model.lm_head.__dict__ if "hf_rocm" in name or name == "forward"]
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.lm_head.register_forward_hook(lambda *_: None), "has a forward hook"),
        (lambda model: setattr(model, "lm_head", Quantised(64, 96, bias=False)), "is of type"),
        (lambda model: setattr(model.lm_head, "forward", lambda x: x), "has its own forward"),
    ],
    ids=["hook", "subclass", "forward"],
)
def test_a_changed_output_head_stays_stock_with_the_reason(change, reason):
    model = build()
    change(model)
    forward = model.lm_head.forward
    hf_rocm.prepare(model, force=True)
    assert model.lm_head.forward == forward and BACKEND not in model.lm_head.__dict__
    assert any("the output head stays stock" in line and reason in line for line in hf_rocm.explain(model).linears)


def test_a_route_of_the_output_head_takes_precedence_and_undoing_it_restores_the_earlier_one():
    model = hf_rocm.prepare(build(), force=True)
    routed = hf_rocm.route_linear(model, force=True)
    assert "lm_head" in routed.layers and model.lm_head.__dict__[BACKEND] == "auto"
    hf_rocm.prepare(model, force=True)
    assert model.lm_head.__dict__[BACKEND] == "auto"
    routed.undo()
    assert model.lm_head.__dict__[BACKEND] == FEW_ROWS


def test_the_forward_of_a_class_that_was_set_later_runs():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = hf_rocm.prepare(build(), force=True)
    with torch.no_grad():
        expected = 2 * model(IDS).logits
        model.lm_head.__class__ = Doubled
        assert torch.equal(model(IDS).logits, expected)
        assert torch.equal(hf_rocm.restore(model)(IDS).logits, expected)
