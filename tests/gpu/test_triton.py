"""Triton kernels compiled for a GPU: results as accurate as the eager tier's, rounding, and recorded graphs."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops.pointwise import ACTIVATIONS, eager_act_and_mul, eager_rms_norm, torch_act_and_mul
from hf_rocm.ops.rotary_angles import LAYOUTS
from hf_rocm.ops.rotary_angles import stock as stock_angles
from tests.tolerance import assert_as_good_as_eager

pytestmark = pytest.mark.gpu

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TERMS = {"limit": 2.0, "alpha": 1.702}


@pytest.fixture(autouse=True)
def unprobed():
    pytest.importorskip("triton", reason="not run: needs Triton")
    with options.override(probe=False):
        yield


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def routed(tier, operation, *arguments, **keywords):
    with options.override(tier=tier), ops.recording() as routes, torch.no_grad():
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [(operation, tier)]
    return output


def angles(batch, length, rotated, dtype, *, interleaved=False):
    turns = random(batch, length, rotated // 2, dtype=torch.float64, seed=9) * 6
    doubled = turns.repeat_interleave(2, -1) if interleaved else torch.cat((turns, turns), -1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_angles_are_as_accurate_as_pytorchs_functions(layout, dtype):
    inv_freq = 10000.0 ** -(torch.arange(64, device="cuda") / 64)
    for position_ids in (torch.tensor([[131071]]), torch.arange(131073)[None], torch.arange(2**20 - 9, 2**20)[None]):
        arguments = inv_freq, position_ids.cuda()
        outputs = routed("triton", "rotary_angles", *arguments, dtype=dtype, scaling=1.25, layout=layout)
        eager = stock_angles(*arguments, 1.25, layout, dtype)
        expected = stock_angles(inv_freq.double(), arguments[1], 1.25, layout, dtype)
        for results in zip(outputs, eager, expected, strict=True):
            assert_as_good_as_eager(*results)


def heads(b, s, dtype, *, h=32, kv=8, d=128):
    fused = random(b, s, (h + 2 * kv) * d, dtype=dtype)
    return [part.unflatten(-1, (-1, d)).transpose(1, 2) for part in fused.split((h * d, kv * d, kv * d), -1)]


@every_dtype
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("shape", [(1, 4096), (3, 63), (37, 3584), (4, 9, 128), (2, 16384), (5, 32768)], ids=str)
def test_rms_norm(shape, one_plus, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    for total, output in (
        (x, routed("triton", "rms_norm", x, weight, eps=1e-6, one_plus=one_plus)),
        routed("triton", "add_rms_norm", x, residual, weight, eps=1e-6, one_plus=one_plus)[::-1],
    ):
        expected = eager_rms_norm(total.double(), weight.double(), 1e-6, one_plus)
        assert_as_good_as_eager(output, eager_rms_norm(total, weight, 1e-6, one_plus), expected)
    assert torch.equal(total, x + residual)


def test_norms_round_where_transformers_does():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    layer = LlamaRMSNorm(4096, eps=1e-5).to("cuda", torch.bfloat16)
    layer.weight.data.copy_(random(4096, dtype=torch.bfloat16, seed=1))
    x = random(256, 4096, dtype=torch.bfloat16)
    with torch.no_grad():
        differs = layer(x) != routed("triton", "rms_norm", x, layer.weight, eps=1e-5)
    assert differs.float().mean() < 1e-3


@every_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 14336), (3, 63), (257, 2880)], ids=str)
def test_act_and_mul(shape, activation, interleaved, dtype):
    x = random(shape[0], 2 * shape[1], dtype=dtype) * 3
    output = routed("triton", "act_and_mul", x, activation=activation, interleaved=interleaved, **TERMS)
    expected = eager_act_and_mul(x.double(), activation, interleaved, **TERMS)
    assert_as_good_as_eager(output, torch_act_and_mul(x, activation, interleaved, **TERMS), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "rotated"), [(128, 128), (64, 64), (80, 32), (256, 256), (96, 96)])
@pytest.mark.parametrize(("b", "s"), [(1, 1), (3, 1), (2, 130)])
def test_rope_is_bitwise_equal_to_the_torch_tier(b, s, d, rotated, interleaved, dtype):
    query, key, value = heads(b, s, dtype, d=d)
    tables = angles(b, s, rotated, dtype, interleaved=interleaved)
    output = routed("triton", "rope", query, key, *tables, interleaved=interleaved)
    stock = routed("torch", "rope", query, key, *tables, interleaved=interleaved)
    assert torch.equal(output[0], stock[0]) and torch.equal(output[1], stock[1])
    for counted in (False, True, None):
        caches = []
        for tier in ("triton", "torch"):
            keys, values = (random(b, 8, s + 7, d, dtype=dtype, seed=seed) for seed in (1, 2))
            position = torch.tensor(5, device="cuda") if counted else torch.arange(s, device="cuda") + 5
            if counted is None:
                position = None
            cache = {"keys": keys, "values": values, "position": position, "interleaved": interleaved}
            out = routed(tier, "rope_into_cache", query, key, value, *tables, **cache)
            caches.append((out, keys, values, *([] if position is None else [position])))
        assert all(torch.equal(actual, expected) for actual, expected in zip(*caches, strict=True))


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("counted", [False, True])
def test_a_recorded_graph_writes_at_the_position_on_the_device(counted, b):
    query, key, value = heads(b, 1, torch.bfloat16)
    tables = angles(1, 1, 128, torch.bfloat16)
    keys = torch.zeros(b, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    position = torch.tensor(0, device="cuda") if counted else torch.zeros(1, dtype=torch.int64, device="cuda")

    def step():
        return ops.rope_into_cache(query, key, value, *tables, keys=keys, values=values, position=position)

    with options.override(tier="triton"), torch.no_grad():
        # This call compiles the kernels.
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    keys.zero_()
    position.fill_(3)
    for _ in range(2):
        graph.replay()
        if not counted:
            position.add_(1)
    torch.cuda.synchronize()
    assert position.item() == 5
    assert [bool(keys[:, :, row].any()) for row in range(7)] == [False, False, False, True, True, False, False]
    assert torch.equal(values[:, :, 3], value[:, :, 0]) and torch.equal(keys[:, :, 3], keys[:, :, 4])


def test_keys_beyond_the_cache_are_not_written_and_the_result_is_nan():
    query, key, value = heads(1, 1, torch.bfloat16)
    cache = torch.zeros(2, 1, 8, 4, 128, device="cuda", dtype=torch.bfloat16)
    position = torch.tensor([4], device="cuda")
    arguments = {"keys": cache[0], "values": cache[0], "position": position}
    out = routed("triton", "rope_into_cache", query, key, value, *angles(1, 1, 128, torch.bfloat16), **arguments)
    assert out.isnan().all() and not cache.any()


def test_kernels_are_selected_and_checked_in_a_child_process():
    x, weight = random(2, 1032, dtype=torch.bfloat16), random(1032, dtype=torch.bfloat16, seed=1)
    with options.override(tier="triton", probe=True, refresh=True):
        assert torch.isfinite(ops.rms_norm(x, weight, eps=1e-6)).all()
