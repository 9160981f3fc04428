"""act and act_and_mul in the Triton kernels, compared with float64, and with the rounding of the torch tier."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.act import ACTIVATIONS as FORMULAS
from hf_rocm.ops.act import eager_act, torch_act
from hf_rocm.ops.pointwise import ACTIVATIONS, CLAMPED, eager_act_and_mul, torch_act_and_mul
from hf_rocm.ops.specs.experts import ExpertsCall, Form
from hf_rocm.ops.triton import activation as wrapper
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, random, routed

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TERMS = {"limit": 2.0, "alpha": 1.702}


@every_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(65, 1), (3, 63), (2, 2, 130), (2, 1500)], ids=str)
def test_act_and_mul(shape, activation, interleaved, dtype):
    # 60 makes the exponential of some gates overflow.
    for scale in (3, 60):
        x = random(*shape[:-1], 2 * shape[-1], dtype=dtype) * scale
        output = routed("act_and_mul", x, activation=activation, interleaved=interleaved, **TERMS)
        expected = eager_act_and_mul(x.double(), activation, interleaved, **TERMS)
        # compare with unfused layers, which round the activation
        assert_as_good_as_eager(output, torch_act_and_mul(x, activation, interleaved, **TERMS), expected)
    gates = x.unflatten(-1, (-1, 2))[..., 0] if interleaved else x[..., : shape[-1]]
    # A NaN affects only its own element.
    for first in range(3):
        mask = (torch.arange(output.numel()) % 3 == first).view(output.shape)
        kept = gates.clone()
        gates.masked_fill_(mask, torch.nan)
        masked = routed("act_and_mul", x, activation=activation, interleaved=interleaved, **TERMS)
        gates.copy_(kept)
        assert masked[mask].isnan().all() and torch.equal(masked[~mask], output[~mask])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_rounds_like_unfused_layers(activation):
    # x has no large gates, for which terms of the formula cancel.
    x = random(64, 256, dtype=torch.bfloat16)
    actual = routed("act_and_mul", x, activation=activation, **TERMS)
    expected = torch_act_and_mul(x, activation, False, **TERMS)
    # PyTorch's functions are approximations on a CPU.
    if activation != CLAMPED:
        gate, up = x.chunk(2, -1)
        ones = torch.ones_like(gate, dtype=torch.float64)
        expected = eager_act_and_mul(torch.cat((gate.double(), ones), -1), activation).bfloat16() * up
    # the last bit of an exponential may differ, which moves a few values across a rounding boundary
    assert (actual != expected).sum() <= 3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_values_saturate_and_nan_is_kept(activation):
    gate = torch.cat([torch.tensor([-1e30, -100.0, 100.0, float("nan")]), torch.linspace(-6, 6, 60)])
    x = torch.cat([gate, torch.ones(64)])[None]
    actual = routed("act_and_mul", x, activation=activation, **TERMS)
    expected = torch_act_and_mul(x, activation, False, **TERMS)
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_rows_may_be_strided():
    x = random(4, 40, dtype=torch.float32)
    expected = routed("act_and_mul", x[:, :24].clone(), activation="silu")
    torch.testing.assert_close(expected, torch_act_and_mul(x[:, :24], "silu", False, **TERMS))
    assert torch.equal(routed("act_and_mul", x[:, :24], activation="silu"), expected)
    assert torch.equal(routed("act_and_mul", x.t().contiguous().t()[:, :24], activation="silu"), expected)


def test_nothing_is_launched_for_empty_inputs():
    assert routed("act_and_mul", torch.empty(0, 8), activation="silu").shape == (0, 4)


@pytest.mark.parametrize(
    ("x", "word"), [(torch.ones(1, 4, requires_grad=True), "gradient"), (torch.ones(1, 4).double(), "float64")]
)
def test_unsupported_calls_are_refused(x, word):
    with pytest.raises(TierUnavailable, match=word):
        routed("act_and_mul", x, activation="silu")


@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (1, 14336), (4096, 8192)])
def test_tiles_are_powers_of_two(rows, dim):
    block, threads = wrapper.tile(rows, dim)
    assert block & (block - 1) == 0 and threads & (threads - 1) == 0 and 32 <= threads <= 1024


def test_it_is_one_op_of_a_compiled_graph():
    x = random(2, 16, dtype=torch.float32)
    nodes = compiled_once(lambda x: ops.act_and_mul(x, activation=CLAMPED, limit=1.0) * 2, x)
    assert "hf_rocm.triton_act_and_mul.default" in nodes


@pytest.mark.parametrize("name", ["grouped", "gathered"])
def test_experts_include_the_activation(name):
    from hf_rocm import options
    from hf_rocm.ops import moe_torch

    tokens, experts, hidden, inner = 3, 4, 16, 8
    x = random(tokens, hidden, dtype=torch.bfloat16)
    gate_up = random(experts, 2 * inner, hidden, dtype=torch.bfloat16, seed=1)
    down = random(experts, hidden, inner, dtype=torch.bfloat16, seed=2)
    ids, weights = torch.tensor([[0, 3], [1, 2], [3, 1]]), torch.full((tokens, 2), 0.5, dtype=torch.bfloat16)
    form = Form(CLAMPED, transposed=False, interleaved=True, weigh_input=False, limit=2.0, alpha=1.702)
    call = ExpertsCall(x, gate_up, down, ids, weights, None, None, form)
    results = {}
    for tier in ("triton", "torch"):
        with options.override(tiers={"act_and_mul": tier}), ops.recording() as routes, torch.no_grad():
            results[tier] = getattr(moe_torch, name)(call)
        assert [route.operation for route in routes] == (["act_and_mul"] if tier == "triton" else [])
    torch.testing.assert_close(results["triton"], results["torch"])


@every_dtype
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("shape", [(1,), (3, 63), (2, 2, 600)], ids=str)
def test_act(shape, activation, dtype):
    # 60 makes the exponential of some values overflow.
    for scale in (3, 60):
        x = random(*shape, dtype=dtype) * scale
        output = routed("act", x, activation=activation)
        expected = eager_act(x.double(), activation)
        assert_as_good_as_eager(output, torch_act(x, activation), expected)
    # A NaN affects only its own element.
    for first in range(3):
        mask = (torch.arange(x.numel()) % 3 == first).view(shape)
        masked = routed("act", x.masked_fill(mask, torch.nan), activation=activation)
        assert masked[mask].isnan().all() and torch.equal(masked[~mask], output[~mask])


def test_act_supports_views_and_empty_inputs():
    x = random(6, 40, dtype=torch.bfloat16)
    for view in (x.t(), x[:, ::2], x[:0]):
        output = routed("act", view, activation="quick_gelu")
        assert output.is_contiguous()
        assert torch.equal(output, routed("act", view.contiguous(), activation="quick_gelu"))


def test_act_refuses_gradients_and_is_one_op_of_a_compiled_graph():
    with pytest.raises(TierUnavailable, match="gradient"):
        routed("act", torch.ones(2, 4, requires_grad=True), activation="gelu_new")
    x = random(2, 16, dtype=torch.float32)
    nodes = compiled_once(lambda x: ops.act(x, activation="gelu_new") * 2, x)
    assert "hf_rocm.triton_act.default" in nodes
