"""Attention in the torch and eager tiers, compared with a float64 reference that loops over the keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.attention import STACKED_QUERIES
from tests.tolerance import assert_as_good_as_eager

TIERS = ("torch", "eager")
SHAPES = {  # B, H, Hkv, S_q, S_k, D, D_v
    "square": (2, 4, 2, 7, 7, 16, 16),
    "decode": (2, 4, 2, 1, 9, 16, 16),
    "one": (1, 1, 1, 1, 1, 8, 8),
    "chunk": (2, 6, 2, 5, 63, 24, 24),
    "long": (1, 4, 1, STACKED_QUERIES + 3, STACKED_QUERIES + 3, 16, 16),
    "long_chunk": (1, 4, 2, STACKED_QUERIES + 1, 63, 16, 16),
    "more_queries": (1, 2, 1, 5, 3, 8, 8),
    "value_dim": (2, 4, 2, 3, 6, 12, 20),
}


def reference(query, key, value, *, scale, causal=False, mask=None, window=None, softcap=None, sinks=None):
    """Compute the reference in float64, one query at a time."""
    query, key, value = query.double(), key.double(), value.double()
    b, h, s_q, _ = query.shape
    s_k, group = key.shape[2], h // key.shape[1]
    output = torch.zeros(b, s_q, h, value.shape[3], dtype=torch.float64)
    for row in range(b):
        for head in range(h):
            for i in range(s_q):
                position = s_k - s_q + i
                scores, values = [], []
                for j in range(s_k):
                    if (causal and j > position) or (window is not None and j <= position - window):
                        continue
                    score = float(query[row, head, i] @ key[row, head // group, j]) * scale
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if mask is not None:
                        entry = mask[row % mask.shape[0], head % mask.shape[1], i % mask.shape[2], j]
                        if entry.dtype == torch.bool:
                            if not entry:
                                continue
                        elif entry == -torch.inf:
                            continue
                        else:
                            score += float(entry)
                    scores.append(score)
                    values.append(value[row, head // group, j])
                if not scores:
                    continue
                extra = [] if sinks is None else [float(sinks[head])]
                weights = torch.softmax(torch.tensor(scores + extra, dtype=torch.float64), 0)[: len(scores)]
                output[row, i, head] = sum(w * v for w, v in zip(weights, values, strict=True))
    return output


def tensors(shape, dtype, seed=0):
    b, h, kv_heads, s_q, s_k, d, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    # transposed views of [B, S, H, D], as in the layers
    query = torch.randn(b, s_q, h, d, generator=generator).to(dtype).transpose(1, 2)
    key = torch.randn(b, s_k, kv_heads, d, generator=generator).to(dtype).transpose(1, 2)
    value = torch.randn(b, s_k, kv_heads, value_dim, generator=generator).to(dtype).transpose(1, 2)
    return query, key, value


def run(tier, *arguments, **keywords):
    with options.override(tiers={"attention": tier}), ops.recording() as routes:
        output, weights = ops.attention(*arguments, **keywords)
    assert [route.tier for route in routes] == [tier]
    return output, weights


def check(tier, shape, dtype, **keywords):
    query, key, value = tensors(shape, dtype)
    output, _ = run(tier, query, key, value, scale=query.shape[3] ** -0.5, **keywords)
    expected = reference(query, key, value, scale=query.shape[3] ** -0.5, **keywords)
    eager, _ = run("eager", query, key, value, scale=query.shape[3] ** -0.5, **keywords)
    assert output.is_contiguous()
    assert_as_good_as_eager(output, eager, expected, summed=value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tier", TIERS)
def test_attention_is_as_accurate_as_the_eager_tier(tier, shape, causal, dtype):
    check(tier, shape, dtype, causal=causal)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [1, 4, 100])
@pytest.mark.parametrize("tier", TIERS)
def test_windows_hide_distant_keys(tier, window, shape):
    check(tier, shape, torch.float32, causal=True, window=window)


@pytest.mark.parametrize("heads", ["shared", "each"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tier", TIERS)
def test_masks_hide_keys(tier, shape, causal, kind, heads):
    b, h, _, s_q, s_k, _, _ = shape
    generator = torch.Generator().manual_seed(1)
    visible = torch.rand(b, h if heads == "each" else 1, s_q, s_k + 2, generator=generator) > 0.3
    # every query attends to key 0, because the tiers may return different results for fully masked queries
    visible[..., 0] = True
    if kind == "bool":
        mask = visible
    else:
        mask = torch.where(visible, torch.randn(visible.shape, generator=generator), -torch.inf)
    check(tier, shape, torch.float32, causal=causal, mask=mask)


@pytest.mark.parametrize("tier", TIERS)
def test_a_query_before_the_first_key_is_zero(tier):
    query, key, value = tensors(SHAPES["more_queries"], torch.float32)
    output, _ = run(tier, query, key, value, scale=0.25, causal=True)
    assert torch.equal(output[:, :2], torch.zeros_like(output[:, :2]))
    assert (output[:, 2:].abs().amax((-1, -2)) > 0).all()


def test_a_fully_masked_query_is_zero_in_eager_and_finite_elsewhere():
    query, key, value = tensors(SHAPES["square"], torch.float32)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    mask[..., 2, :] = False
    for tier in TIERS:
        output, _ = run(tier, query, key, value, scale=0.25, mask=mask)
        assert torch.isfinite(output).all()
    # This is the output of eager, which is the last tier.
    assert torch.equal(output[:, 2], torch.zeros_like(output[:, 2]))
    assert output[:, 3].abs().max() > 0


@pytest.mark.parametrize(
    "shape", [SHAPES["square"], SHAPES["decode"], SHAPES["chunk"]], ids=["square", "decode", "chunk"]
)
def test_softcap_and_sinks_run_in_eager(shape):
    query, key, value = tensors(shape, torch.float32)
    extras = {"softcap": 3.0, "sinks": torch.linspace(-1, 1, shape[1])}
    with ops.recording() as routes:
        output, _ = ops.attention(query, key, value, scale=0.3, causal=True, **extras)
    assert [route.tier for route in routes] == ["eager"]
    expected = reference(query, key, value, scale=0.3, causal=True, **extras)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


def test_attention_weights_are_the_softmax():
    query, key, value = tensors(SHAPES["square"], torch.float32)
    output, weights = ops.attention(query, key, value, scale=0.25, causal=True, weights=True)
    assert weights.shape == (2, 4, 7, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7))
    expanded = value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(output.transpose(1, 2), weights @ expanded)


@pytest.mark.parametrize("keywords", [{"softcap": 5.0}, {"sinks": torch.zeros(4)}, {"weights": True}], ids=str)
def test_a_named_tier_raises_with_its_reason(keywords):
    query, key, value = tensors(SHAPES["square"], torch.float32)
    with options.override(tier="torch"), pytest.raises(TierUnavailable, match="torch/SDPA"):
        ops.attention(query, key, value, scale=0.25, **keywords)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("s_q", [1, 5, STACKED_QUERIES + 4])
def test_keys_and_values_are_never_expanded(tier, masked, s_q, monkeypatch):
    """Every intermediate tensor is smaller than the expanded keys, or at most as large as the scores."""
    b, h, kv_heads, s_k, d = 1, 8, 2, 64, 32
    query, key, value = tensors((b, h, kv_heads, s_q, s_k, d, d), torch.float32)
    mask = torch.ones(b, 1, s_q, s_k, dtype=torch.bool) if masked else None
    expanded_bytes = b * h * s_k * d * 4
    largest = _largest_allocation(lambda: run(tier, query, key, value, scale=0.2, mask=mask, causal=s_q == 1))
    scores_bytes = b * h * s_q * s_k * 4
    assert largest < max(expanded_bytes, scores_bytes + 1)


def _largest_allocation(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sizes
    return max(sizes)


@settings(max_examples=40, deadline=None)
@given(
    b=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    s_q=st.integers(1, 20),
    s_k=st.integers(1, 20),
    d=st.sampled_from([1, 3, 8]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8),
    tier=st.sampled_from(TIERS),
)
def test_any_shape_is_supported(b, kv_heads, groups, s_q, s_k, d, causal, window, tier):
    check(tier, (b, kv_heads * groups, kv_heads, s_q, s_k, d, d), torch.float32, causal=causal, window=window)


@pytest.mark.parametrize("tier", TIERS)
def test_gradients_equal_those_of_sdpa(tier):
    query, key, value = (t.detach().requires_grad_() for t in tensors(SHAPES["square"], torch.float64))
    output, _ = run(tier, query, key, value, scale=0.25, causal=True)
    output.square().sum().backward()
    gradients = [t.grad.clone() for t in (query, key, value)]
    group_key, group_value = (t.detach().repeat_interleave(2, 1).requires_grad_() for t in (key, value))
    other = query.detach().requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(
        other, group_key, group_value, is_causal=True, scale=0.25
    ).square().sum().backward()
    torch.testing.assert_close(gradients[0], other.grad)
    torch.testing.assert_close(gradients[1], group_key.grad.unflatten(1, (2, 2)).sum(2))
    torch.testing.assert_close(gradients[2], group_value.grad.unflatten(1, (2, 2)).sum(2))
