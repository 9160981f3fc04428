"""One kernel for the cache write and decode attention: compared with float64 and separate kernels, and in a graph."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops import probe_cases
from hf_rocm.ops.specs.attention import AttendIntoCacheSpec
from tests.gpu.test_triton import angles, random
from tests.tolerance import assert_as_good_as_eager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("triton") is None, reason="not run: needs Triton")]

BF16, FP16 = torch.bfloat16, torch.float16


def tensors(shape, dtype, *, tokens=1, rotated=None, once=False):
    b, h, kv_heads, size, d = shape
    widths = h * d, kv_heads * d, kv_heads * d
    parts = random(b, tokens, sum(widths), dtype=dtype).split(widths, -1)
    tables = angles(1, tokens, rotated or d, dtype)
    if once:
        tables = tuple(table[..., : (rotated or d) // 2] for table in tables)
    heads = [part.unflatten(-1, (-1, d)).transpose(1, 2) for part in parts]
    return [*heads, *tables], *(random(b, kv_heads, size, d, dtype=dtype, seed=seed) for seed in (1, 2))


def run_in(tier, *arguments, operation="attend_into_cache", **keywords):
    with torch.no_grad(), options.override(tier=tier, probe=False), ops.recording() as routes:
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [(operation, tier)]
    return output


CASES = {  # B, H, Hkv, L, D; the length; other arguments
    "llama": ((1, 32, 8, 1000, 128), 900, {}),
    "first token": ((3, 32, 8, 1000, 128), 1, {}),
    "qwen3": ((1, 32, 8, 5000, 128), 4999, {"norms": False}),
    "padded": ((3, 32, 8, 700, 128), 63, {"norms": False, "starts": [0, 5, 62]}),
    "gemma3": ((2, 8, 4, 3000, 256), 2777, {"norms": True, "window": 1024}),
    "gemma2": ((1, 8, 4, 3000, 256), 2777, {"softcap": 50.0, "window": 512}),
    "gpt-oss": ((2, 64, 8, 333, 64), 333, {"sinks": True, "window": 128, "once": True}),
    "phi": ((1, 32, 32, 500, 80), 450, {"rotated": 32}),
    "large batch": ((40, 32, 8, 80, 128), 77, {"sinks": True}),
    "one key head": ((2, 48, 1, 300, 64), 290, {}),
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("tokens", [1, 6, 16])
def test_results_are_correct_and_only_the_new_rows_are_written(case, tokens, dtype):
    shape, length, terms = case
    length = max(length, tokens)
    first = length - tokens
    settings = {"rotated": terms.get("rotated"), "once": terms.get("once", False)}
    inputs, keys, values = tensors(shape, dtype, tokens=tokens, **settings)
    positions = torch.arange(first, length, device="cuda")
    settings = {"lengths": torch.tensor([length], device="cuda"), "position": positions}
    settings |= {"scale": shape[4] ** -0.5, "window": terms.get("window"), "softcap": terms.get("softcap")}
    settings |= {"starts": torch.tensor(terms["starts"], device="cuda") if "starts" in terms else None}
    settings |= {"once": terms.get("once", False)}
    weights = [random(shape[4], dtype=dtype, seed=seed) / 2 for seed in (5, 6)]
    sinks = torch.linspace(-2, 2, shape[1], device="cuda", dtype=dtype) if terms.get("sinks") else None
    results = []
    for tier, convert in (("triton", torch.clone), ("eager", torch.clone), ("eager", torch.Tensor.double)):
        norms = None
        if "norms" in terms:
            norms = tuple(ops.Norm(convert(weight), 1e-6, terms["norms"]) for weight in weights)
        caches = convert(keys), convert(values)
        if tier == "triton":
            for cache in caches:
                cache[:, :, first:] = torch.nan
        sink = None if sinks is None else convert(sinks)
        arguments = {"keys": caches[0], "values": caches[1], "norms": norms, "sinks": sink}
        output = run_in(tier, *map(convert, inputs), **arguments, **settings)
        results.append((output, *(cache[:, :, first:length] for cache in caches)))
        if tier == "triton":
            assert all(
                torch.equal(new[:, :, :first], old[:, :, :first])
                for new, old in zip(caches, (keys, values), strict=True)
            )
            assert all(cache[:, :, length:].isnan().all() for cache in caches)
    for actual, eager, exact in zip(*results, strict=True):
        assert_as_good_as_eager(actual, eager, exact)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("rotated", [128, 32])
@pytest.mark.parametrize("b", [1, 3])
def test_keys_are_rotated_as_in_the_other_kernel(b, rotated, dtype):
    inputs, keys, values = tensors((b, 32, 8, 600, 128), dtype, rotated=rotated)
    lengths, position = torch.tensor([500], device="cuda"), torch.tensor([499], device="cuda")
    other = {"keys": keys.clone(), "values": values.clone(), "position": position}
    query = run_in("triton", *inputs, operation="rope_into_cache", **other)
    separate = run_in("triton", query, other["keys"], other["values"], lengths, operation="decode_attention", scale=0.1)
    output = run_in("triton", *inputs, lengths, keys=keys, values=values, position=position, scale=0.1)
    assert torch.equal(keys, other["keys"]) and torch.equal(values, other["values"])
    torch.testing.assert_close(output, separate, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_a_recorded_graph_reads_the_current_position():
    inputs, keys, values = tensors((2, 32, 8, 3000, 128), BF16)
    lengths, position = torch.tensor([900], device="cuda"), torch.tensor([899], device="cuda")
    norms = tuple(ops.Norm(random(128, dtype=BF16, seed=seed), 1e-6) for seed in (5, 6))
    arguments = {"keys": keys, "values": values, "position": position, "scale": 0.1, "norms": norms}
    run_in("triton", *inputs, lengths, **arguments)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = run_in("triton", *inputs, lengths, **arguments)
    for length in (901, 902, 2999, 3000):
        lengths.fill_(length)
        position.fill_(length - 1)
        again = {**arguments, "keys": keys.clone(), "values": values.clone()}
        graph.replay()
        assert torch.equal(output, run_in("triton", *inputs, lengths, **again))
        assert torch.equal(keys, again["keys"]) and torch.equal(values, again["values"])
    before = keys.clone()
    lengths.fill_(3001)
    position.fill_(3000)
    graph.replay()
    assert output.isnan().all() and torch.equal(keys, before)


@pytest.mark.parametrize("one_query", [True, False])
@pytest.mark.parametrize("norm", [None, BF16], ids=str)
def test_the_kernel_passes_its_check(norm, one_query):
    device = torch.device("cuda", torch.cuda.current_device())
    spec = AttendIntoCacheSpec(
        dtype=BF16,
        angle_dtype=BF16,
        device=device,
        heads=32,
        kv_heads=8,
        head_dim=128,
        value_dim=128,
        rotated=128,
        shared=True,
        once=False,
        norm_dtype=norm,
        one_plus=False,
        softcap=False,
        sinks=False,
        starts=True,
        window=None,
        grad=False,
        one_query=one_query,
    )
    assert probe_cases.check("attend_into_cache", "triton", "decode_kernel, new keys", tuple(spec)) is None
