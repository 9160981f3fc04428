"""Implementations that users register are preferred, checked, recorded with their refusals, and removed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_rocm import ops, options
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import moe_torch, probe, registry
from hf_rocm.ops.specs.experts import ExpertsCall


@pytest.fixture
def register():
    removals = []

    def add(operation="linear", name="mine", call=F.linear, refuses=lambda spec, device: None, **further):
        removals.append(ops.register(operation, name=name, call=call, refuses=refuses, **further))
        return removals[-1]

    yield add
    for remove in removals:
        remove()
    probe.forget()


def linear(k=8):
    with torch.no_grad(), ops.recording() as routes:
        output = ops.linear(torch.ones(2, k), torch.ones(4, k))
    return output, (routes[0].tier, routes[0].name)


def test_a_user_kernel_is_preferred_until_it_is_removed(register):
    remove = register()
    assert linear()[1] == ("user", "mine")
    remove()
    assert linear()[1] == ("torch", "F.linear")
    # Removing it again changes nothing.
    remove()


def test_the_refusal_of_a_user_kernel_is_recorded(register):
    register(refuses=lambda spec, device: f"K is {spec.k}" if spec.k != 8 else None)
    assert linear(16)[1] == ("torch", "F.linear")
    (choice,) = registry.operations()["linear"].choices.values()
    assert ("user", "mine", "K is 16") in choice.refusals
    with options.override(tier="user"):
        assert linear(8)[1] == ("user", "mine")
        with pytest.raises(TierUnavailable, match="K is 16"):
            linear(16)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x, w, b: F.linear(x, w, b) * 1.01, "wrong by"),
        (lambda x, w, b: F.linear(x, w, b) * torch.nan, "not finite"),
        (lambda x, w, b: F.linear(x, w, b)[..., :1], "its output is [1, 1], not [1, 4]"),
        (lambda x, w: x, "it raised TypeError"),
    ],
)
def test_a_wrong_implementation_is_disabled_with_one_warning(register, call, reason):
    register(call=call)
    with pytest.warns(RuntimeWarning, match="linear won't use user's mine for float32 in this process") as caught:
        output, route = linear()
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert route == ("torch", "F.linear") and torch.equal(output, torch.full((2, 4), 8.0))
    # It is disabled for every size.
    assert linear(16)[1] == ("torch", "F.linear")


def test_an_implementation_that_is_wrong_in_one_dtype_serves_the_others(register):
    register(call=lambda x, w, b: F.linear(x, w, b) * (1.01 if x.dtype == torch.float32 else 1))
    with pytest.warns(RuntimeWarning, match="user's mine for float32 in this process"):
        assert linear()[1] == ("torch", "F.linear")
    with torch.no_grad(), ops.recording() as routes:
        ops.linear(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16))
    assert (routes[0].tier, routes[0].name) == ("user", "mine")
    assert probe.failed("linear", "user", "mine", torch.float32) is not None
    assert probe.failed("linear", "user", "mine", torch.bfloat16) is None


def test_the_check_can_be_disabled(register):
    register(call=lambda x, w, b: x, check=False)
    assert linear()[1] == ("user", "mine")


def test_gradients_are_checked_if_requested(register):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return 2 * grad @ weight, grad.t() @ x, None

    register(call=Doubled.apply)
    assert linear()[1] == ("user", "mine")
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="wrong by"):
        ops.linear(x, torch.ones(4, 8)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 8), 4.0))


def test_invalid_registrations_are_refused(register):
    with pytest.raises(OptionError, match="no operation 'softmax'"):
        register("softmax")
    register()
    with pytest.raises(OptionError, match="already"):
        register()


def test_an_implementation_gets_all_arguments_by_position(register):
    """As documented, an implementation gets the operation's arguments by position, not the internal call object."""
    arguments = []

    def experts(x, gate_up, down, ids, weights, gate_up_bias, down_bias, form):
        arguments.append((ids.shape, gate_up_bias, form.activation))
        return moe_torch.sorted_loop(ExpertsCall(x, gate_up, down, ids, weights, gate_up_bias, down_bias, form))

    register("experts", call=experts)
    x, ids, weights = torch.ones(2, 8), torch.tensor([[0], [1]]), torch.ones(2, 1)
    stacked = torch.full((3, 8, 8), 0.1), torch.full((3, 8, 4), 0.1)
    with torch.no_grad(), ops.recording() as routes:
        output = ops.experts(x, *stacked, ids, weights)
    assert (routes[-1].tier, routes[-1].name) == ("user", "mine") and arguments[-1] == ((2, 1), None, "silu")
    with torch.no_grad(), options.override(tiers={"experts": "eager"}):
        torch.testing.assert_close(output, ops.experts(x, *stacked, ids, weights))
