"""Packed, decode and paged attention, norms, activations, rope and shuffled weights in the torch and eager tiers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_rocm import ops, options
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.shuffled import unshuffle
from tests.ops.test_attention import reference
from tests.tolerance import assert_as_good_as_eager

DTYPES = [torch.float32, torch.bfloat16]
TIERS = ["torch", "eager"]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_tier = pytest.mark.parametrize("tier", TIERS)


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(family, tier, operation, *arguments, **keywords):
    with options.override(tiers={family: tier}), ops.recording() as routes:
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [(operation, tier)]
    return output


@every_dtype
@every_tier
@pytest.mark.parametrize("window", [None, 2])
def test_varlen_attention(tier, dtype, window):
    query, key = random(9, 4, 8, dtype=dtype), random(14, 2, 8, dtype=dtype, seed=1)
    value = random(14, 2, 12, dtype=dtype, seed=2)
    ends, key_ends = torch.tensor([0, 3, 4, 9], dtype=torch.int32), torch.tensor([0, 3, 9, 14], dtype=torch.int32)
    arguments = {"longest_query": 5, "longest_key": 6, "scale": 0.3, "causal": True, "window": window}
    output = routed("attention", tier, "varlen_attention", query, key, value, ends, key_ends, **arguments)
    eager = routed("attention", "eager", "varlen_attention", query, key, value, ends, key_ends, **arguments)
    pieces = []
    for (a, b), (c, d) in [((0, 3), (0, 3)), ((3, 4), (3, 9)), ((4, 9), (9, 14))]:
        parts = (tensor.transpose(0, 1)[None] for tensor in (query[a:b], key[c:d], value[c:d]))
        pieces.append(reference(*parts, scale=0.3, causal=True, window=window)[0])
    assert_as_good_as_eager(output, eager, torch.cat(pieces), summed=value)


@every_dtype
@every_tier
def test_log_sum_exp_of_packed_sequences(tier, dtype):
    """The result is −inf for queries without keys, and for those after the last sequence."""
    query, key = random(9, 4, 8, dtype=dtype), random(14, 2, 8, dtype=dtype, seed=1)
    ends, key_ends = torch.tensor([0, 3, 4, 6], dtype=torch.int32), torch.tensor([0, 9, 9, 14], dtype=torch.int32)
    arguments = {"longest_query": 3, "longest_key": 9, "scale": 0.3, "causal": True, "window": 4, "lse": True}
    output, actual = routed("attention", tier, "varlen_attention", query, key, key, ends, key_ends, **arguments)
    _, eager = routed("attention", "eager", "varlen_attention", query, key, key, ends, key_ends, **arguments)
    expected = torch.full((9, 4), -torch.inf, dtype=torch.float64)
    for first, last, a, b in ((0, 3, 0, 9), (4, 6, 9, 14)):
        for i in range(first, last):
            end = b - (last - 1 - i)
            seen = key[max(a, end - 4) : end].double().repeat_interleave(2, 1)
            expected[i] = (query[i].double() * seen).sum(-1).mul(0.3).logsumexp(0)
    assert actual.dtype == torch.float32 and torch.equal(actual.isinf(), expected.isinf())
    assert torch.equal(output[3:4], output[6:7]) and (output[3:4] == 0).all()
    finite = ~expected.isinf()
    assert_as_good_as_eager(actual[finite], eager[finite], expected[finite])


@every_tier
def test_attention_over_parts_of_the_keys_can_be_combined_with_log_sum_exp(tier):
    query, key = random(5, 4, 8, dtype=torch.float32), random(12, 2, 8, dtype=torch.float32, seed=1)
    value = random(12, 2, 8, dtype=torch.float32, seed=2)

    def attend(begin, end):
        ends = torch.tensor([0, 5]), torch.tensor([0, end - begin])
        arguments = {"longest_query": 5, "longest_key": end - begin, "scale": 0.3, "lse": True}
        return routed(
            "attention", tier, "varlen_attention", query, key[begin:end], value[begin:end], *ends, **arguments
        )

    whole, total = attend(0, 12)
    parts = [attend(0, 7), attend(7, 12)]
    combined = sum(output * (lse - total).exp()[..., None] for output, lse in parts)
    torch.testing.assert_close(combined, whole)
    torch.testing.assert_close(torch.logaddexp(*(lse for _, lse in parts)), total)


def test_softcap_of_packed_sequences_runs_in_eager():
    query, ends = random(4, 2, 8, dtype=torch.float32), torch.tensor([0, 4], dtype=torch.int32)
    arguments = {"longest_query": 4, "longest_key": 4, "scale": 1.0, "softcap": 2.0}
    with ops.recording() as routes:
        output = ops.varlen_attention(query, query, query, ends, ends, **arguments)
    assert routes[0].tier == "eager"
    expected = reference(*(query.transpose(0, 1)[None] for _ in range(3)), scale=1.0, softcap=2.0)[0]
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    with options.override(tier="torch"), pytest.raises(TierUnavailable, match="SDPA has no softcap"):
        ops.varlen_attention(query, query, query, ends, ends, **arguments)


@every_dtype
@every_tier
def test_decode_attention_ignores_unwritten_keys(tier, dtype):
    query, key, value = random(3, 4, 1, 8, dtype=dtype), *(random(3, 2, 6, 8, dtype=dtype, seed=s) for s in (1, 2))
    for row, length in enumerate((1, 6, 3)):
        key[row, :, length:] = value[row, :, length:] = 1e4
    lengths = torch.tensor([1, 6, 3], dtype=torch.int32)
    output = routed("attention", tier, "decode_attention", query, key, value, lengths, scale=0.3)
    eager = routed("attention", "eager", "decode_attention", query, key, value, lengths, scale=0.3)
    expected = torch.cat(
        [
            reference(query[[row]], key[[row], :, :length], value[[row], :, :length], scale=0.3)
            for row, length in enumerate((1, 6, 3))
        ]
    )
    assert_as_good_as_eager(output, eager, expected, summed=value[value < 1e4])


def test_sinks_of_decode_attention_run_in_eager():
    query, key = random(1, 4, 1, 8, dtype=torch.float32), random(1, 2, 6, 8, dtype=torch.float32, seed=1)
    sinks = torch.linspace(-1, 1, 4)
    lengths = torch.tensor([4], dtype=torch.int32)
    output = ops.decode_attention(query, key, key, lengths, scale=0.3, sinks=sinks)
    expected = reference(query, key[:, :, :4], key[:, :, :4], scale=0.3, sinks=sinks)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    with options.override(tier="torch"), pytest.raises(TierUnavailable, match="SDPA has no sinks"):
        ops.decode_attention(query, key, key, lengths, scale=0.3, sinks=sinks)


@every_dtype
@every_tier
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 63), (0, 8)], ids=str)
def test_add_rms_norm(tier, dtype, one_plus, shape):
    x, residual, weight = (random(*s, dtype=dtype, seed=i) for i, s in enumerate([shape, shape, shape[-1:]]))
    normed, total = routed("rms_norm", tier, "add_rms_norm", x, residual, weight, eps=1e-6, one_plus=one_plus)
    assert torch.equal(total, x + residual)
    with options.override(tier=tier):
        assert torch.equal(normed, ops.rms_norm(total, weight, eps=1e-6, one_plus=one_plus))


@every_dtype
@every_tier
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 63), (0, 8)], ids=str)
def test_norm_add(tier, dtype, one_plus, shape):
    """norm_add is bitwise equal to its parts, with and without the second norm."""
    sizes = [shape, shape, shape[-1:], shape[-1:]]
    x, residual, first, second = (random(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes))
    norms = ops.Norm(first, 1e-6, one_plus), ops.Norm(second, 1e-5, one_plus)
    normed, total = routed("rms_norm", tier, "norm_add", x, residual, *norms)
    with options.override(tier=tier):
        assert torch.equal(total, residual + ops.rms_norm(x, first, eps=1e-6, one_plus=one_plus))
        assert torch.equal(normed, ops.rms_norm(total, second, eps=1e-5, one_plus=one_plus))
        none, alone = ops.norm_add(x, residual, norms[0])
    assert none is None and torch.equal(alone, total)


@every_dtype
@every_tier
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("keep_sum", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 63), (0, 8)], ids=str)
def test_add_layer_norm(tier, dtype, shape, keep_sum, biased):
    """The torch tier is bitwise equal to separate layers, and both tiers agree with float64 within the tolerance."""
    sizes = [shape, shape, shape[-1:], shape[-1:]]
    x, residual, weight, bias = (random(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes))
    bias = bias if biased else None
    arguments = {"eps": 1e-5, "keep_sum": keep_sum}
    normed, total = routed("rms_norm", tier, "add_layer_norm", x, residual, weight, bias, **arguments)
    assert torch.equal(total, x + residual) if keep_sum else total is None
    stock = torch.nn.functional.layer_norm(x + residual, shape[-1:], weight, bias, 1e-5)
    if tier == "torch":
        assert torch.equal(normed, stock)
    if x.numel():
        wide = [None if tensor is None else tensor.double() for tensor in (x + residual, weight, bias)]
        assert_as_good_as_eager(normed, stock, torch.nn.functional.layer_norm(wide[0], shape[-1:], *wide[1:], 1e-5))


@every_dtype
@every_tier
@pytest.mark.parametrize(("name", "module"), [("quick_gelu", "QuickGELUActivation"), ("gelu_new", "NewGELUActivation")])
def test_act(name, module, tier, dtype):
    """In the torch tier, outputs and gradients are bitwise equal to those of transformers' modules."""
    from transformers import activations

    stock = getattr(activations, module)()
    x = (random(3, 21, dtype=dtype) * 4).requires_grad_()
    output = routed("act_and_mul", tier, "act", x, activation=name)
    expected, eager = stock(x.double()), stock(x)
    assert_as_good_as_eager(output, eager, expected)
    if tier == "torch":
        assert torch.equal(output, eager)
        gradients = [torch.autograd.grad(result.sum(), x)[0] for result in (output, eager)]
        assert torch.equal(*gradients)
    with pytest.raises(OptionError, match="does not support the activation 'relu'"):
        ops.act(x, activation="relu")


def test_gradients_of_add_layer_norm_equal_those_of_separate_operations():
    x, residual, weight, bias = (random(*size, dtype=torch.float32) for size in ((3, 8), (3, 8), (8,), (8,)))
    gradients = []
    for run in (
        lambda *terms: ops.add_layer_norm(*terms, eps=1e-5)[0],
        lambda x, residual, *terms: torch.nn.functional.layer_norm(x + residual, (8,), *terms, 1e-5),
    ):
        terms = [tensor.clone().requires_grad_() for tensor in (x, residual, weight, bias)]
        gradients.append(torch.autograd.grad(run(*terms).square().sum(), terms))
    assert all(map(torch.equal, *gradients))


def test_norm_add_refuses_norms_of_two_kinds():
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(OptionError, match="norms of the same kind"):
        ops.norm_add(x, x, ops.Norm(weight, 1e-6, False), ops.Norm(weight, 1e-6, True))


@every_dtype
@every_tier
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [2, 6, 8])
def test_rope_rotates_every_pair_by_its_angle(tier, dtype, interleaved, rotated):
    query, key = random(2, 3, 5, 8, dtype=dtype), random(2, 1, 5, 8, dtype=dtype, seed=1)
    angles = torch.rand(2, 5, rotated // 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 6
    doubled = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    tables = doubled.cos().to(dtype), doubled.sin().to(dtype)
    outputs = routed("rope", tier, "rope", query, key, *tables, interleaved=interleaved)
    with options.override(tier="eager"):
        eager = ops.rope(query, key, *tables, interleaved=interleaved)
    for output, eager_output, x in zip(outputs, eager, (query, key), strict=True):
        expected = x.double().clone()
        for pair in range(rotated // 2):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotated // 2)
            cos, sin = (table[:, None, :, a].double() for table in tables)
            expected[..., a] = x[..., a].double() * cos - x[..., b].double() * sin
            expected[..., b] = x[..., b].double() * cos + x[..., a].double() * sin
        if tier == "eager":
            assert_as_good_as_eager(output, eager_output, expected)
        else:
            # As in unfused layers, results are rounded three times.
            allowed = 3 * torch.finfo(dtype).eps * expected.abs().max() + 1e-12
            assert (output.double() - expected).abs().max() <= allowed


@given(n=st.integers(1, 5), k=st.integers(1, 4))
def test_shuffling_is_a_permutation_with_an_inverse(n, k):
    weight = torch.arange(16 * n * 32 * k, dtype=torch.int16).view(16 * n, 32 * k)
    shuffled = ops.shuffle(weight)
    assert shuffled.data.shape == weight.shape and torch.equal(shuffled.plain(), weight)
    assert torch.equal(unshuffle(ops.shuffle(weight).data), weight)
    assert not torch.equal(shuffled.data, weight)
    assert torch.equal(shuffled.data.flatten()[:8], weight[0, :8])
    # The next 8 elements are from the next row, not from the next columns.
    assert torch.equal(shuffled.data.flatten()[8:16], weight[1, :8])


@every_tier
@pytest.mark.parametrize("bias", [False, True])
def test_shuffled_linear(tier, bias):
    x, weight = random(2, 3, 32, dtype=torch.bfloat16), random(16, 32, dtype=torch.bfloat16, seed=1)
    offset = random(16, dtype=torch.bfloat16, seed=2) if bias else None
    output = routed("linear", tier, "shuffled_linear", x, ops.shuffle(weight), offset)
    with options.override(tier=tier):
        assert torch.equal(output, ops.linear(x, weight, offset))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((15, 32), torch.bfloat16), ((16, 48), torch.bfloat16), ((16, 32), torch.float32)]
)
def test_unsupported_weights_are_not_shuffled(shape, dtype):
    with pytest.raises(OptionError, match="can't be shuffled"):
        ops.shuffle(torch.zeros(shape, dtype=dtype))


@every_dtype
def test_the_output_is_zero_for_queries_without_keys(dtype):
    """The output is zero for queries without keys, and for those after the last sequence."""
    query, key = random(9, 4, 8, dtype=dtype), random(7, 2, 8, dtype=dtype, seed=1)
    ends, key_ends = (torch.tensor(sums, dtype=torch.int32) for sums in ([0, 3, 3, 5], [0, 3, 7, 7]))
    sinks = torch.linspace(-1, 1, 4).to(dtype)
    arguments = {"longest_query": 3, "longest_key": 4, "scale": 0.3, "causal": True}
    output = routed("attention", "eager", "varlen_attention", query, key, key, ends, key_ends, sinks=sinks, **arguments)
    assert output.shape == (9, 4, 8) and (output[3:] == 0).all()
    parts = (tensor.transpose(0, 1)[None] for tensor in (query[:3], key[:3], key[:3]))
    expected, _ = ops.attention(*parts, scale=0.3, causal=True, sinks=sinks)
    assert torch.equal(output[:3], expected[0])
    with options.override(tier="torch"), pytest.raises(TierUnavailable, match="SDPA has no sinks"):
        ops.varlen_attention(query, key, key, ends, key_ends, sinks=sinks, **arguments)


@every_dtype
@every_tier
def test_paged_attention_uses_the_page_table(tier, dtype):
    """Unwritten slots are NaN. For a row without a request, the output is zero and nothing is written."""
    query, new = random(3, 4, 1, 8, dtype=dtype), random(3, 2, 1, 8, dtype=dtype, seed=1)
    pages = torch.full((7, 4, 2, 8), torch.nan, dtype=dtype)
    table = torch.tensor([[5, 2], [0, -1], [-1, -1]], dtype=torch.int32)
    lengths = torch.tensor([6, 1, 0], dtype=torch.int32)
    earlier = random(5, 2, 8, dtype=dtype, seed=2)
    pages[5], pages[2, 0] = earlier[:4], earlier[4]
    values = pages.clone()
    output = routed("attention", tier, "paged_attention", query, pages, values, table, lengths, new, new, scale=0.3)
    assert torch.equal(pages[2, 1], new[0, :, 0]) and torch.equal(values[0, 0], new[1, :, 0])
    assert int(pages.isfinite().sum()) == 7 * 2 * 8 and (output[2] == 0).all()
    keys = torch.cat((earlier, new[0, :, 0][None])).transpose(0, 1)[None]
    expected = reference(query[:1], keys, keys, scale=0.3)[0]
    eager, _ = ops.attention(query[:1], keys, keys, scale=0.3)
    assert_as_good_as_eager(output[:1], eager, expected.view_as(eager), summed=keys)
