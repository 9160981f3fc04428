"""gated_delta_prefill in PyTorch is as accurate as transformers' function and as single steps, at any length."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hf_rocm import ops, options
from tests.ops.test_delta import DTYPES
from tests.tolerance import assert_as_good_as_eager, assert_run_as_good_as_eager

SIZES = {
    "one token": {"length": 1},
    "five tokens": {"length": 5, "fresh": True},
    "shorter than the taps": {"length": 2, "fresh": True, "batch": 1},
    "one head": {"length": 64, "groups": 1, "shared": 1, "fresh": True},
    "three chunks": {"length": 131, "shared": 3, "key_dim": 12, "value_dim": 20},
    "contiguous": {"length": 70, "joined": False, "key_dim": 16, "value_dim": 16},
    "two taps": {"length": 33, "taps": 2, "fresh": True},
}

# Inputs that are numerically difficult: gates that keep nothing or everything, equal or opposite keys, and zeros. They
# are compared only in fp32, because in other dtypes the norm at the end amplifies earlier rounding errors.
HARD = {
    "forgets": {"decay": 30.0},
    "remembers": {"decay": -20.0},
    "some forget": {"decay": (30.0, -20.0)},
    "equal keys": {"decay": -20.0, "key": 1.0, "beta": 20.0},
    "opposite keys": {"decay": -20.0, "key": (3.0, -3.0), "beta": 20.0},
    "zeros": {"query": 0.0, "key": 0.0, "value": 0.0},
}


def drawn(
    dtype, *, length, batch=2, groups=2, shared=2, key_dim=8, value_dim=6, taps=4, joined=True, fresh=False, seed=0
):
    """Returns (the six inputs, the keyword arguments).

    joined: the inputs are views of two GEMM outputs. fresh: no states.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, spread=1.0):
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    heads, width = groups * shared, shared * value_dim
    sizes = (key_dim, key_dim, width, width)
    query, key, value, gate = draw(batch, length, groups, sum(sizes)).split(sizes, -1)
    value, gate = (part.unflatten(-1, (shared, value_dim)) for part in (value, gate))
    inputs = query, key, value, gate, *draw(batch, length, groups, 2 * shared, spread=3.0).split(shared, -1)
    channels = 2 * groups * key_dim + heads * value_dim
    keywords = {
        "conv_weight": draw(channels, taps),
        "log_rate": draw(heads),
        "bias": draw(heads, spread=3.0),
        "norm_weight": draw(value_dim),
        "eps": 1e-6,
    }
    if not fresh:
        keywords["conv_state"] = draw(batch, channels, taps)
        state = draw(batch, heads, key_dim, value_dim)
        keywords["state"] = state.to(torch.promote_types(dtype, torch.float32))
    return [part if joined else part.contiguous() for part in inputs], keywords


def hard(dtype, filled, **sizes):
    """Returns the results of `drawn`, with some inputs filled with one number or with two alternating numbers."""
    inputs, keywords = drawn(dtype, **sizes)
    for index, name in enumerate(("query", "key", "value", "gate", "beta", "decay")):
        if name in filled:
            numbers = torch.tensor(filled[name], dtype=dtype).flatten()
            repeated = numbers[torch.arange(inputs[index].shape[1]) % len(numbers)]
            inputs[index] = repeated.view(1, -1, *[1] * (inputs[index].dim() - 2)).expand_as(inputs[index])
    return inputs, keywords


def converted(inputs, keywords, dtype):
    return (
        [part.to(dtype) for part in inputs],
        {name: value if name == "eps" else value.to(dtype) for name, value in keywords.items()},
    )


def in_tier(tier, inputs, keywords):
    with torch.no_grad(), options.override(tier=tier):
        return ops.gated_delta_prefill(*inputs, **keywords)


def check(serve, inputs, keywords):
    """Output and state must be within the tolerance of single steps, and the convolution's state must be exact.

    Chunks are rounded at different points than single steps, which are accurate by chance for some inputs. The
    error may therefore also be as large as that of single steps in float64 whose inputs have rounding errors.
    """
    actual = serve(*inputs, **keywords)
    steps = in_tier("eager", inputs, keywords)
    wide = converted(inputs, keywords, torch.float64)
    exact = in_tier("eager", *wide)
    for index, name in enumerate(("output", "convolution", "state")):
        eps = torch.finfo(steps[index].dtype).eps
        runs = ({name: in_tier("eager", *rounded(*wide, eps, seed))[index]} for seed in range(3))
        parts = ({name: results[index]} for results in (actual, steps, exact))
        assert_run_as_good_as_eager(*parts, rounded=runs)
    assert torch.equal(actual[1], steps[1])


def rounded(inputs, keywords, eps, seed):
    """The inputs with a random relative error of up to half of eps."""
    generator = torch.Generator().manual_seed(seed)

    def perturbed(x):
        return x * (1 + (torch.rand(x.shape, generator=generator, dtype=x.dtype) - 0.5) * eps)

    return [perturbed(x) for x in inputs], {
        name: value if name == "eps" else perturbed(value) for name, value in keywords.items()
    }


def chunked(*inputs, **keywords):
    return in_tier("torch", inputs, keywords)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_chunks_are_as_accurate_as_single_steps(sizes, dtype):
    check(chunked, *drawn(dtype, **sizes))


@pytest.mark.parametrize("filled", HARD.values(), ids=HARD)
def test_extreme_values_are_as_accurate_as_in_single_steps(filled):
    check(chunked, *hard(torch.float32, filled, length=100))


@pytest.mark.parametrize("tier", ["torch", "eager"])
@pytest.mark.parametrize("fresh", [True, False])
def test_results_equal_those_of_single_steps(fresh, tier):
    """In float64, a prompt and single tokens agree to within 1e-9, and the caller's states are not changed."""
    inputs, keywords = drawn(torch.float64, length=70, fresh=fresh)
    before = {name: value if name == "eps" else value.clone() for name, value in keywords.items()}
    out, conv_state, state = in_tier(tier, inputs, keywords)
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(before[name])) for name, value in keywords.items())
    before.setdefault("conv_state", torch.zeros_like(conv_state))
    before.setdefault("state", torch.zeros_like(state))
    with options.override(tier="eager"):
        for token in range(70):
            step = ops.gated_delta_step(*(part[:, token] for part in inputs), **before)
            torch.testing.assert_close(out[:, token], step, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, before["state"], rtol=1e-9, atol=1e-9)
    assert torch.equal(conv_state, before["conv_state"])


def stock(query, key, value, gate, beta, decay, *, conv_weight, log_rate, bias, norm_weight, eps, state=None):
    """Compute a prompt with the functions and dtypes of transformers' layer. Returns output and state."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    batch, length, groups, shared, value_dim = value.shape
    heads, key_dim = groups * shared, query.shape[-1]
    mixed = torch.cat([part.flatten(2) for part in (query, key, value)], -1).transpose(1, 2)
    taps = conv_weight.shape[1]
    mixed = functional.conv1d(mixed, conv_weight.unsqueeze(1), padding=taps - 1, groups=len(conv_weight))
    mixed = functional.silu(mixed[..., :length]).transpose(1, 2)
    query, key, value = mixed.split([groups * key_dim, groups * key_dim, heads * value_dim], -1)
    query, key = (part.unflatten(-1, (groups, -1)).repeat_interleave(shared, 2) for part in (query, key))
    out, state = module.torch_chunk_gated_delta_rule(
        query,
        key,
        value.unflatten(-1, (heads, -1)),
        g=-log_rate.float().exp() * functional.softplus(decay.flatten(2).float() + bias),
        beta=beta.flatten(2).sigmoid(),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = module.Qwen3NextRMSNormGated(value_dim, eps=eps).to(out.dtype)
    norm.weight.data.copy_(norm_weight)
    normed = norm(out.reshape(-1, value_dim), gate.reshape(-1, value_dim))
    return normed.view(batch, length, heads, value_dim), state


@pytest.mark.parametrize(
    ("dtype", "filled"),
    [*((dtype, {}) for dtype in DTYPES), *((torch.float32, filled) for filled in HARD.values())],
    ids=[*map(str, DTYPES), *HARD],
)
@pytest.mark.parametrize("length", [5, 130])
def test_results_equal_those_of_transformers_layer(length, dtype, filled):
    """Both tiers are as close to float64 as transformers' function is."""
    inputs, keywords = hard(dtype, filled, length=length, fresh=True)
    exact = in_tier("eager", *converted(inputs, keywords, torch.float64))
    with torch.no_grad():
        expected = stock(*inputs, **keywords)
    for tier in ("torch", "eager"):
        out, _, state = in_tier(tier, inputs, keywords)
        assert_as_good_as_eager(out, expected[0], exact[0])
        assert_as_good_as_eager(state, expected[1], exact[2])


def test_a_prompt_in_parts_equals_the_whole_prompt():
    """A prompt is processed in three parts, each starting from the states of the previous one."""
    inputs, keywords = drawn(torch.float64, length=100, fresh=True)
    whole = in_tier("torch", inputs, keywords)
    outputs, states = [], {}
    for first, last in ((0, 2), (2, 67), (67, 100)):
        out, *after = in_tier("torch", [part[:, first:last] for part in inputs], {**keywords, **states})
        outputs.append(out)
        states = dict(zip(("conv_state", "state"), after, strict=True))
    torch.testing.assert_close(torch.cat(outputs, 1), whole[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states["state"], whole[2], rtol=1e-9, atol=1e-9)
    assert torch.equal(states["conv_state"], whole[1])


@pytest.mark.parametrize("tier", ["torch", "eager"])
def test_without_tokens_the_states_are_unchanged(tier):
    inputs, keywords = drawn(torch.float32, length=0)
    out, conv_state, state = in_tier(tier, inputs, keywords)
    assert out.shape == (2, 0, 4, 6)
    assert torch.equal(conv_state, keywords["conv_state"]) and torch.equal(state, keywords["state"])


def test_gradients_reach_the_inputs():
    inputs, keywords = drawn(torch.float32, length=40, fresh=True)
    inputs[0].requires_grad_()
    with options.override(tier="torch"):
        ops.gated_delta_prefill(*inputs, **keywords)[0].sum().backward()
    assert inputs[0].grad.abs().sum() > 0


def test_the_shapes_are_recorded():
    inputs, keywords = drawn(torch.bfloat16, length=3)
    with torch.no_grad(), options.override(tier="torch"), ops.recording() as routes:
        ops.gated_delta_prefill(*inputs, **keywords)
    assert [(route.operation, route.tier, route.shapes) for route in routes] == [
        ("gated_delta_prefill", "torch", ((2, 3, 2, 8), (2, 3, 2, 2, 6)))
    ]
