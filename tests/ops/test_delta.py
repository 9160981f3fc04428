"""gated_delta_step in PyTorch computes one token as transformers does, and updates both states in place."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import delta
from tests.tolerance import assert_as_good_as_eager

STATES = ("conv_state", "state")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(dtype, *, batch=2, groups=3, shared=2, key_dim=8, value_dim=6, taps=4, joined=True, seed=0):
    """Returns (the six inputs, the keyword arguments). joined: the inputs are views of two GEMM outputs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, spread=1.0):
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    heads, width = groups * shared, shared * value_dim
    sizes = (key_dim, key_dim, width, width)
    query, key, value, gate = draw(batch, groups, sum(sizes)).split(sizes, -1)
    value, gate = (part.unflatten(-1, (shared, value_dim)) for part in (value, gate))
    inputs = query, key, value, gate, *draw(batch, groups, 2 * shared, spread=3.0).split(shared, -1)
    channels = 2 * groups * key_dim + heads * value_dim
    keywords = {
        "conv_weight": draw(channels, taps),
        "conv_state": draw(batch, channels, taps),
        "state": draw(batch, heads, key_dim, value_dim).to(torch.promote_types(dtype, torch.float32)),
        "log_rate": draw(heads),
        "bias": draw(heads, spread=3.0),
        "norm_weight": draw(value_dim),
        "eps": 1e-6,
    }
    return [part if joined else part.contiguous() for part in inputs], keywords


def converted(keywords, dtype=None):
    """Copy the tensors, because a call updates the states in place. dtype: the dtype of the copies, if it differs."""
    return {
        name: value if name == "eps" else value.clone() if dtype is None else value.to(dtype, copy=True)
        for name, value in keywords.items()
    }


def check(serve, dtype, **sizes):
    """Run three steps. Outputs and states must be within the tolerance, and the convolution's state must be exact."""
    keywords = drawn(dtype, **sizes)[1]
    runs = [(serve, dtype, []), (eager, dtype, []), (eager, torch.float64, [])]
    for call, run_dtype, results in runs:
        state = converted(keywords, None if run_dtype is dtype else run_dtype)
        for token in range(3):
            inputs = drawn(dtype, seed=token, **sizes)[0]
            out = call(*(inputs if run_dtype is dtype else (part.to(run_dtype) for part in inputs)), **state)
            results.append((out, *(state[name].clone() for name in STATES)))
    by_run = ([torch.stack(parts) for parts in zip(*results, strict=True)] for _, _, results in runs)
    outputs, conv_states, states = zip(*by_run, strict=True)
    assert_as_good_as_eager(*outputs)
    assert_as_good_as_eager(*states)
    assert torch.equal(*conv_states[:2])


def eager(*inputs, **keywords):
    with options.override(tier="eager"):
        return ops.gated_delta_step(*inputs, **keywords)


def stock(query, key, value, gate, beta, decay, *, conv_weight, conv_state, state, log_rate, bias, norm_weight, eps):
    """Compute the step with the functions of transformers' layer. Returns the output and the states."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    convolve = getattr(module, "causal_conv1d_update", None) or module.torch_causal_conv1d_update
    batch, groups, shared, value_dim = value.shape
    heads, conv_state = groups * shared, conv_state.clone()
    mixed = torch.cat([part.reshape(batch, -1) for part in (query, key, value)], -1).unsqueeze(-1)
    mixed = convolve(mixed, conv_state, conv_weight, None, "silu").squeeze(-1)
    query, key, value = mixed.split([query[0].numel(), key[0].numel(), value[0].numel()], -1)
    query, key = (part.reshape(batch, 1, groups, -1).repeat_interleave(shared, 2) for part in (query, key))
    rate = -log_rate.float().exp() * functional.softplus(decay.reshape(batch, 1, heads).float() + bias)
    out, state = module.torch_recurrent_gated_delta_rule(
        query,
        key,
        value.reshape(batch, 1, heads, value_dim),
        g=rate,
        beta=beta.reshape(batch, 1, heads).sigmoid(),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = module.Qwen3NextRMSNormGated(value_dim, eps=eps).to(out.dtype)
    norm.weight.data.copy_(norm_weight)
    return norm(out.view(-1, value_dim), gate.reshape(-1, value_dim)).view(batch, heads, value_dim), conv_state, state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("joined", [True, False])
def test_results_equal_those_of_transformers_layer(joined, dtype):
    with torch.no_grad():
        inputs, keywords = drawn(dtype, joined=joined)
        expected = stock(*inputs, **keywords)
        after = converted(keywords)
        out = eager(*inputs, **after)
        wide = converted(keywords, torch.float64)
        exact = eager(*(part.double() for part in inputs), **wide)
    assert torch.equal(after["conv_state"], expected[1])
    assert_as_good_as_eager(out, expected[0], exact)
    assert_as_good_as_eager(after["state"], expected[2], wide["state"])


def test_the_eager_tier_follows_the_formula():
    """Compare one head with the formula, written out in float64."""
    (query, key, value, gate, beta, decay), keywords = drawn(torch.float64, batch=1, groups=1, shared=1)
    before = converted(keywords)
    out = eager(query, key, value, gate, beta, decay, **keywords)[0, 0]
    new = torch.cat((query, key, value[:, 0]), -1).view(-1, 1)
    window = torch.cat((before["conv_state"][0, :, 1:], new), 1)
    assert torch.equal(keywords["conv_state"][0], window)
    mixed = (window * before["conv_weight"]).sum(1)
    mixed = mixed / (1 + (-mixed).exp())
    q, k, v = mixed.split((8, 8, 6))
    q, k = (part / (part.dot(part) + 1e-6).sqrt() for part in (q, k))
    factor = (-before["log_rate"].exp() * torch.log1p((decay[0, 0, 0] + before["bias"]).exp())).exp()
    old = before["state"][0, 0] * factor
    new = old + torch.outer(k, (v - k @ old) / (1 + (-beta[0, 0, 0]).exp()))
    torch.testing.assert_close(keywords["state"][0, 0], new)
    result = q @ new / 8**0.5
    result = result / (result.square().mean() + 1e-6).sqrt() * before["norm_weight"]
    torch.testing.assert_close(out, result * gate[0, 0, 0] / (1 + (-gate[0, 0, 0]).exp()))


def test_the_torch_tier_equals_eager_and_records_its_shapes():
    inputs, keywords = drawn(torch.bfloat16)
    expected = eager(*inputs, **converted(keywords))
    with torch.no_grad(), options.override(tier="torch"), ops.recording() as routes:
        out = ops.gated_delta_step(*inputs, **keywords)
    assert torch.equal(out, expected)
    assert [(route.operation, route.tier, route.shapes) for route in routes] == [
        ("gated_delta_step", "torch", ((2, 3, 8), (2, 3, 2, 6), (2, 84, 4), (2, 6, 8, 6)))
    ]


def test_a_required_tier_that_cannot_serve_is_reported_before_the_call():
    x = torch.ones(1)
    assert delta.refused_in(x) is None
    required = {**options.current().aiter, "attention": options.Switch.REQUIRED}
    with options.override(aiter=required):
        assert "must run in the aiter tier" in delta.refused_in(x)
        inputs, keywords = drawn(torch.float32)
        with pytest.raises(TierUnavailable):
            ops.gated_delta_step(*inputs, **keywords)
