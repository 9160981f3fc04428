"""rope and rope_into_cache in the Triton kernel. Without norms, results equal the torch tier's in bf16 and fp16."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.pointwise import eager_rope
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, random, routed

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_form = pytest.mark.parametrize("interleaved", [False, True])


def angles(batch, length, rotated, dtype, *, interleaved=False):
    radians = (
        torch.rand(batch, length, rotated // 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 6
    )
    doubled = radians.repeat_interleave(2, -1) if interleaved else torch.cat((radians, radians), -1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def heads(b, s, dtype, *, h=3, kv=2, d=8, d_v=8, more=0):
    """Queries, keys and values as views of one fused projection, with `more` additional columns."""
    sizes = (h * d, kv * d, kv * d_v)
    fused = random(b, s, sum(sizes) + more, dtype=dtype)
    parts = zip(fused.split([*sizes, more], -1)[:3], (d, d, d_v), strict=True)
    return [part.unflatten(-1, (-1, dim)).transpose(1, 2) for part, dim in parts]


def separate(b, s, dtype, *, step, **dims):
    """Queries, keys and values with different strides."""
    return [heads(b, s, dtype, more=step * place, **dims)[place] for place in range(3)]


def torch_tier(operation, *arguments, **keywords):
    with options.override(tier="torch"):
        return getattr(ops, operation)(*arguments, **keywords)


def assert_equal(actual, expected):
    # The compiler may fuse a multiplication and an addition.
    atol = 2e-6 if actual.dtype == torch.float32 else 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, equal_nan=True)


def put_nan(tensor, first):
    """Write NaN to every third element of the last dim, in place."""
    tensor.masked_fill_(torch.arange(tensor.shape[-1]) % 3 == first, torch.nan)


@every_dtype
@every_form
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize(("d", "rotated"), [(8, 8), (8, 2), (6, 6), (80, 32), (96, 96)])
def test_rope(d, rotated, tables, interleaved, dtype):
    # Both sizes use the same compiled variant.
    for batch, length in ((2, 5), (3, 7)) if suite.gpu() else ((2, 5),):
        query, key, _ = (heads if length == 5 else partial(separate, step=16))(batch, length, dtype, d=d)
        cos, sin = angles(1 if tables == 1 else batch, length, rotated, dtype, interleaved=interleaved)
        for changed in (None, query, cos, sin):
            before = None if changed is None else changed.clone()
            if changed is not None:
                put_nan(changed, length % 3)
            outputs = routed("rope", query, key, cos, sin, interleaved=interleaved)
            expected = torch_tier("rope", query, key, cos, sin, interleaved=interleaved)
            for output, reference in zip(outputs, expected, strict=True):
                assert_equal(output, reference)
                assert output.stride(3) == 1
            if changed is not None:
                changed.copy_(before)
    outputs = routed("rope", query, key, cos, sin, interleaved=interleaved)
    eager = eager_rope(query, key, cos, sin, interleaved)
    expected = eager_rope(*(tensor.double() for tensor in (query, key, cos, sin)), interleaved)
    if dtype == torch.float32:
        assert_as_good_as_eager(outputs[0], eager[0], expected[0])


def test_many_heads_need_several_programs():
    for batch in (1,) if suite.gpu() is None else (1, 4):
        query, key, _ = heads(batch, 3, torch.bfloat16, h=70, kv=35, d=64)
        cos, sin = angles(batch, 3, 64, torch.bfloat16)
        actual, expected = routed("rope", query, key, cos, sin), torch_tier("rope", query, key, cos, sin)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@every_dtype
@pytest.mark.parametrize("counted", [False, True, None])
@pytest.mark.parametrize(("b", "s"), [(1, 1), (2, 1), (1, 3), (2, 4)])
def test_rope_into_cache(b, s, counted, dtype):
    """counted: whether the position is a scalar; None: rows 0 … S − 1, without a position."""
    for start, first in ((3, None), (5, 0), (1, 1)):
        results = {}
        for tier in ("triton", "torch"):
            query, key, value = heads(b, s, dtype, d_v=6) if start == 3 else separate(b, s, dtype, d_v=6, step=4)
            cos, sin = angles(b, s, 4, dtype)
            if first is not None:
                for tensor in (query, value, cos) if first else (key, value, sin):
                    put_nan(tensor, first)
            keys, values = random(b, 2, 9, 8, dtype=dtype, seed=1), random(b, 2, 9, 6, dtype=dtype, seed=2)
            position = torch.tensor(start) if counted else (torch.tensor([8, 0, 5, 2])[:s] + start) % 9
            if counted is None:
                position = None
            cache = {"keys": keys, "values": values, "position": position}
            call = routed if tier == "triton" else torch_tier
            out = call("rope_into_cache", query, key, value, cos, sin, **cache)
            results[tier] = (out, keys, values, position)
        for actual, expected in zip(results["triton"][:3], results["torch"][:3], strict=True):
            assert_equal(actual, expected)
        if counted is None:
            assert torch.equal(keys[:, :, s:], random(b, 2, 9, 8, dtype=dtype, seed=1)[:, :, s:])
        else:
            assert torch.equal(results["triton"][3], results["torch"][3])
        assert not counted or position == start + s


def eager_tier(query, key, value, cos, sin, cache, **terms):
    with options.override(tier="eager"):
        return ops.rope_into_cache(query, key, value, cos, sin, **cache, **terms), *cache.values()


@every_dtype
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize(("once", "interleaved"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("b", "s", "d", "rotated"), [(1, 1, 8, 8), (2, 1, 6, 6), (1, 3, 12, 8)])
def test_norms_are_applied_before_the_rotation(b, s, d, rotated, once, one_plus, interleaved, dtype):
    query, key, value = heads(b, s, dtype, d=d, d_v=6)
    query, key = query * 3, key / 7
    cos, sin = angles(1, s, rotated, dtype, interleaved=interleaved)
    if once:
        cos, sin = (angle[..., ::2] if interleaved else angle[..., : rotated // 2] for angle in (cos, sin))
    weights = [random(d, dtype=dtype, seed=seed) / 4 for seed in (5, 6)]
    results = {}
    for tier, convert in (("triton", None), ("eager", None), ("exact", torch.Tensor.double)):
        convert = convert or torch.Tensor.clone
        tensors = [convert(tensor) for tensor in (query, key, value, cos, sin)]
        cache = {"keys": random(b, 2, 9, d, dtype=dtype, seed=1), "values": random(b, 2, 9, 6, dtype=dtype, seed=2)}
        cache = {name: convert(value) for name, value in cache.items()} | {"position": torch.tensor(3)}
        norms = tuple(
            ops.Norm(convert(weight), eps, one_plus) for weight, eps in zip(weights, (1e-6, 1e-2), strict=True)
        )
        terms = {"interleaved": interleaved, "once": once, "norms": norms}
        if tier == "triton":
            results[tier] = routed("rope_into_cache", *tensors, **cache, **terms), *cache.values()
        else:
            results[tier] = eager_tier(*tensors, cache, **terms)
    for actual, eager, exact in zip(*results.values(), strict=True):
        if actual.is_floating_point():
            assert_as_good_as_eager(actual, eager, exact)
        else:
            assert actual == eager == exact == 3 + s


def test_norms_round_like_the_layers():
    """Almost all results equal those of separate norm and rotary kernels. The order of summation may change a few."""
    query, key, value = heads(1, 1, torch.bfloat16, h=8, d=64, d_v=64)
    cos, sin = angles(1, 1, 64, torch.bfloat16)
    cache = {"keys": torch.zeros(1, 2, 4, 64).bfloat16(), "values": torch.zeros(1, 2, 4, 64).bfloat16()}
    norms = tuple(ops.Norm(random(64, dtype=torch.bfloat16, seed=seed), 1e-6) for seed in (1, 2))
    position = torch.tensor(0)
    out = routed("rope_into_cache", query, key, value, cos, sin, **cache, position=position, norms=norms)
    normed = [routed("rms_norm", x, norm.weight, eps=norm.eps) for x, norm in zip((query, key), norms, strict=True)]
    rotated = routed("rope", *normed, cos, sin)
    assert (out == rotated[0]).float().mean() > 0.99
    assert (cache["keys"][:, :, :1] == rotated[1]).float().mean() > 0.99


def test_norms_of_two_kinds_are_refused():
    query, key, value = heads(1, 1, torch.float32)
    cache = {"keys": torch.zeros(1, 2, 4, 8), "values": torch.zeros(1, 2, 4, 8), "position": torch.tensor(0)}
    norms = ops.Norm(torch.ones(8), 1e-6), ops.Norm(torch.ones(8), 1e-6, True)
    with pytest.raises(OptionError, match="the same kind"):
        ops.rope_into_cache(query, key, value, *angles(1, 1, 8, torch.float32), **cache, norms=norms)


@pytest.mark.parametrize(("b", "s"), [(1, 1), (2, 3)])
def test_keys_beyond_the_cache_are_not_written_and_the_result_is_nan(b, s):
    query, key, value = heads(b, s, torch.float32)
    keys, values = torch.zeros(b, 2, 4, 8), torch.zeros(b, 2, 4, 8)
    cache = {"keys": keys, "values": values, "position": torch.tensor(4)}
    out = routed("rope_into_cache", query, key, value, *angles(1, s, 8, torch.float32), **cache)
    assert out.isnan().all() and not keys.any() and not values.any()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"angle": torch.float32}, "angles of torch.float32"),
        ({"grad": True}, "no gradient"),
        ({"d": 1026}, "at most 1024"),
        ({"dtype": torch.float64, "angle": torch.float64}, "float64"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_unsupported_calls_are_refused(change, word):
    dtype = change.get("dtype", torch.bfloat16)
    query, key, _ = heads(1, 2, dtype, d=change.get("d", 8))
    cos, sin = angles(1, 2, 8, change.get("angle", dtype))
    if "grad" in change:
        query = query.detach().clone().requires_grad_()
    with pytest.raises(TierUnavailable, match=word):
        routed("rope", query, key, cos, sin)


def test_they_are_ops_of_a_compiled_graph():
    query, key, value = heads(1, 2, torch.float32)
    cos, sin = angles(1, 2, 8, torch.float32)
    nodes = compiled_once(lambda query: ops.rope(query, key, cos, sin)[0] * 2, query)
    assert "hf_rocm.triton_rope.default" in nodes

    def into_cache(query):
        keys, values, position = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), torch.arange(2)
        out = ops.rope_into_cache(query, key, value, cos, sin, keys=keys, values=values, position=position)
        return out.sum() + keys.sum() + values.sum()

    assert "hf_rocm.triton_rope_into_cache.default" in compiled_once(into_cache, query)
