"""Routed experts in MXFP4 in the torch and eager tiers, compared with float64 and with ordinary weights."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import OptionError
from hf_rocm.ops.mxfp4 import dequantize
from tests.tolerance import assert_as_good_as_eager

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# name → (T, E, k, H, I)
SHAPES = {
    "one token": (1, 8, 2, 64, 32),
    "odd": (63, 5, 3, 96, 160),
    "every expert": (3, 4, 4, 32, 64),
    "one expert each": (9, 4, 1, 64, 96),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def drawn(shape, dtype, seed=0):
    """Returns the positional tensors and the keywords of a call."""
    tokens, experts, top, hidden, intermediate = shape
    generator = torch.Generator().manual_seed(seed)

    def stored(n, k):
        blocks = torch.randint(256, (experts, n, k // 32, 16), generator=generator).to(torch.uint8)
        return blocks, torch.randint(120, 126, (experts, n, k // 32), generator=generator).to(torch.uint8)

    def random(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top]
    weights = torch.rand(tokens, top, generator=generator).to(dtype)
    gate_up = *stored(2 * intermediate, hidden), random(experts, 2 * intermediate)
    down = *stored(hidden, intermediate), random(experts, hidden)
    return (random(tokens, hidden), *gate_up, *down, ids, weights), {"limit": 0.5, "alpha": 1.7}


def unbiased(tensors, activation="silu"):
    """Returns (the tensors without the biases, the keywords for this activation)."""
    return tuple(None if index in (3, 6) else tensor for index, tensor in enumerate(tensors)), {
        "activation": activation
    }


def eager(tensors, keywords):
    with options.override(tiers={"experts": "eager"}):
        return ops.mxfp4_experts(*tensors, **keywords)


def reference(tensors, keywords):
    wide = [tensor.double() if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors]
    return eager(wide, keywords)


@every_dtype
@every_shape
def test_the_torch_tier_is_as_accurate_as_eager(dtype, shape):
    tensors, keywords = drawn(shape, dtype)
    with options.override(tiers={"experts": "torch"}), ops.recording() as routes:
        output = ops.mxfp4_experts(*tensors, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [("mxfp4_experts", "torch")]
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))


@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_other_gates_without_biases_are_as_accurate_as_eager(activation, dtype):
    tensors, keywords = unbiased(drawn((9, 5, 3, 96, 64), dtype)[0], activation)
    with options.override(tiers={"experts": "torch"}):
        output = ops.mxfp4_experts(*tensors, **keywords)
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))
    x, first, first_scales, _, second, second_scales, _, ids, weights = tensors
    wide = [dequantize(first, first_scales, torch.float64), dequantize(second, second_scales, torch.float64)]
    with options.override(tiers={"experts": "eager"}):
        expected = ops.experts(x.double(), *wide, ids, weights.double(), activation=activation, interleaved=True)
    assert torch.equal(reference(tensors, keywords), expected)


def test_invalid_arguments_are_refused():
    (x, *first, second, scales, bias, ids, weights), _ = drawn((2, 4, 2, 32, 32), torch.float32)
    with pytest.raises(OptionError, match="does not support the activation 'relu'"):
        ops.mxfp4_experts(x, *first, second, scales, bias, ids, weights, activation="relu")
    with pytest.raises(OptionError, match="both biases or neither"):
        ops.mxfp4_experts(x, *first, second, scales, None, ids, weights)


@every_shape
def test_the_oracle_equals_that_of_ordinary_weights(shape):
    (x, first, first_scales, first_bias, second, second_scales, second_bias, ids, weights), keywords = drawn(
        shape, torch.float64
    )
    wide = [dequantize(first, first_scales, x.dtype), dequantize(second, second_scales, x.dtype)]
    with options.override(tiers={"experts": "eager"}):
        expected = ops.experts(
            x,
            *wide,
            ids,
            weights,
            activation="clamped_swiglu",
            gate_up_bias=first_bias,
            down_bias=second_bias,
            interleaved=True,
            **keywords,
        )
    actual = eager((x, first, first_scales, first_bias, second, second_scales, second_bias, ids, weights), keywords)
    assert torch.equal(actual, expected)
