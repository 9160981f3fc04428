"""The experts and the residual sum as one operation: its results, and the routes that keep two operations."""

from __future__ import annotations

import sys

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import OptionError
from hf_rocm.ops import moe_torch
from hf_rocm.ops.experts_add import one_kernel, specification
from hf_rocm.ops.specs.experts import ExpertsAddCall, ExpertsCall, ExpertsSpec
from hf_rocm.options import Switch
from tests.ops.test_moe import LAYOUTS, arguments_of, drawn

SHAPE = (5, 7, 3, 20, 9)  # (T, E, k, H, I)


def call(dtype=torch.float32, layout="plain"):
    tensors, keywords = drawn(SHAPE, dtype, LAYOUTS[layout])
    return torch.randn(5, 20, generator=torch.Generator().manual_seed(1)).to(dtype), tensors, keywords


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("tier", "function"), [("torch", moe_torch.sorted_loop), ("eager", moe_torch.eager)], ids=["torch", "eager"]
)
def test_it_equals_the_experts_and_a_sum(tier, function, layout, dtype):
    residual, tensors, keywords = call(dtype, layout)
    before = residual.clone()
    with options.override(tiers={"experts": tier}), ops.recording() as routes:
        output = ops.experts_add(residual, *tensors, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [("experts_add", tier)]
    assert torch.equal(output, residual + function(arguments_of(tensors, keywords))) and torch.equal(residual, before)


@pytest.fixture
def kernel(monkeypatch):
    """Let a kernel serve every call that reaches the router."""
    monkeypatch.setattr(sys.modules["hf_rocm.ops.experts_add"], "kernel_serves", lambda operation, spec: True)


def test_one_kernel_serves_unless_another_route_was_requested(kernel):
    residual, tensors, keywords = call()
    assert one_kernel(residual, *tensors, **keywords)
    for tier in ("torch", "eager", "aiter"):
        with options.override(tiers={"experts": tier}):
            assert not one_kernel(residual, *tensors, **keywords)
    with options.override(tiers={"experts": "triton"}):
        assert one_kernel(residual, *tensors, **keywords)
    with options.override(aiter={**options.current().aiter, "experts": Switch.REQUIRED}):
        assert not one_kernel(residual, *tensors, **keywords)


def test_a_registered_implementation_of_experts_takes_precedence(kernel):
    residual, tensors, keywords = call()
    function = moe_torch.sorted_loop
    remove = ops.register(
        "experts", name="mine", call=lambda *arguments: function(ExpertsCall(*arguments)), refuses=lambda *_: None
    )
    try:
        assert not one_kernel(residual, *tensors, **keywords)
    finally:
        remove()
    assert one_kernel(residual, *tensors, **keywords)


def test_no_kernel_serves_a_cpu():
    residual, tensors, keywords = call(torch.bfloat16)
    assert not one_kernel(residual, *tensors, **keywords)


@pytest.mark.parametrize("which", ["residual", "x"])
def test_gradients_reach_the_residual_and_the_input(which):
    residual, (x, *rest), keywords = call()
    leaf = residual if which == "residual" else x
    leaf.requires_grad_()
    ops.experts_add(residual, x, *rest, **keywords).sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.ne(0).any())
    arguments = ExpertsAddCall(residual, *arguments_of((x, *rest), keywords))
    assert ExpertsSpec(*specification(arguments)).grad
    with torch.no_grad():
        assert not ExpertsSpec(*specification(arguments)).grad


def test_errors_are_those_of_experts():
    residual, tensors, _ = call()
    with pytest.raises(OptionError, match="does not support the activation 'relu'"):
        ops.experts_add(residual, *tensors, activation="relu")
    with pytest.raises(OptionError, match="both biases or neither"):
        ops.experts_add(residual, *tensors, gate_up_bias=torch.zeros(7, 18))


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_residual_that_differs_from_x_is_refused(change, kernel):
    residual, tensors, keywords = call()
    wrong = residual[:1] if change == "shape" else residual.double()
    assert not one_kernel(wrong, *tensors, **keywords)
    with pytest.raises(OptionError, match="a residual of x's shape and dtype"):
        ops.experts_add(wrong, *tensors, **keywords)
