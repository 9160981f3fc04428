"""rms_norm, act_and_mul and linear in the torch and eager tiers, compared with float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_rocm import ops, options
from hf_rocm.errors import OptionError
from hf_rocm.ops.linear import eager_linear
from hf_rocm.ops.pointwise import eager_act_and_mul, eager_rms_norm
from tests.tolerance import assert_as_good_as_eager

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TIERS = ["torch", "eager"]
SHAPES = [(1, 8), (3, 63), (2, 5, 64), (2, 1, 130), (0, 16)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_tier = pytest.mark.parametrize("tier", TIERS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(operation, tier, *arguments, **keywords):
    with options.override(tiers={operation: tier}), ops.recording() as routes:
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [(operation, tier)]
    return output


def compare(output, eager, expected):
    if expected.numel() == 0:
        assert output.shape == expected.shape
    else:
        assert_as_good_as_eager(output, eager, expected)


@every_shape
@every_dtype
@every_tier
@pytest.mark.parametrize("one_plus", [False, True])
def test_rms_norm(tier, dtype, shape, one_plus):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    output = routed("rms_norm", tier, x, weight, eps=1e-6, one_plus=one_plus)
    expected = eager_rms_norm(x.double(), weight.double(), 1e-6, one_plus)
    compare(output, eager_rms_norm(x, weight, 1e-6, one_plus), expected)


def test_rms_norm_follows_the_formula():
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    scale = (12.5 + 1e-6) ** -0.5
    torch.testing.assert_close(ops.rms_norm(x, weight, eps=1e-6), torch.tensor([[3 * scale, 8 * scale]]))
    torch.testing.assert_close(
        ops.rms_norm(x, weight, eps=1e-6, one_plus=True), torch.tensor([[6 * scale, 12 * scale]])
    )


def test_gemma_weights_are_not_rounded_before_the_one_is_added():
    """In bf16, 1 + 2⁻⁸ would be rounded to 1, but the small weight must have an effect."""
    x = torch.full((1, 64), 1024.0, dtype=torch.float32).to(torch.bfloat16)
    x[0, 0] = 0.0
    weight = torch.full((64,), 2.0**-8).to(torch.bfloat16)
    for tier in TIERS:
        output = routed("rms_norm", tier, x, weight, eps=0.0, one_plus=True)
        expected = eager_rms_norm(x.double(), weight.double(), 0.0, True).to(torch.bfloat16)
        rounded = eager_rms_norm(x.double(), torch.zeros(64).double(), 0.0, True).to(torch.bfloat16)
        assert torch.equal(output, expected) and (expected != rounded)[0, 1:].all()


def test_a_weight_of_another_dtype_runs_in_eager():
    with ops.recording() as routes:
        ops.rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), eps=1e-6)
    assert routes[0].tier == "eager"


@every_shape
@every_dtype
@every_tier
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_and_mul(tier, dtype, shape, activation):
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype) * 4
    output = routed("act_and_mul", tier, x, activation=activation)
    expected = eager_act_and_mul(x.double(), activation)
    # the torch tier rounds the activation before the multiplication, as stock does, so compare with stock
    gate, up = x.chunk(2, -1)
    stock = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}[activation](gate)
    compare(output, stock * up, expected)


def test_the_formulas_equal_pytorchs():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    ones = torch.ones_like(x)
    for name, function in {"silu": F.silu, "gelu": F.gelu}.items():
        torch.testing.assert_close(eager_act_and_mul(torch.cat([x, ones]), name), function(x))
    tanh = eager_act_and_mul(torch.cat([x, ones]), "gelu_tanh")
    torch.testing.assert_close(tanh, F.gelu(x, approximate="tanh"))


def test_an_unknown_activation_is_refused():
    with pytest.raises(OptionError, match="relu6"):
        ops.act_and_mul(torch.ones(1, 2), activation="relu6")


@every_dtype
@every_tier
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mnk", [(1, 1, 1), (1, 63, 130), (7, 16, 8), (0, 4, 4)], ids=str)
def test_linear(tier, dtype, bias, mnk):
    m, n, k = mnk
    x, weight = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1)
    offset = random(n, dtype=dtype, seed=2) if bias else None
    output = routed("linear", tier, x, weight, offset)
    expected = eager_linear(x.double(), weight.double(), None if offset is None else offset.double())
    compare(output, eager_linear(x, weight, offset), expected)
