"""Decode attention in the kernel that splits the keys, on a GPU: compared with float64, and in a recorded graph."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops import probe_cases
from hf_rocm.ops.decode import eager_decode, seen_keys
from hf_rocm.ops.specs.attention import AttentionSpec, DecodeSpec
from tests.tolerance import assert_as_good_as_eager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("triton") is None, reason="not run: needs Triton")]

BF16, FP16 = torch.bfloat16, torch.float16


def tensors(shape, dtype):
    b, h, kv_heads, s_q, s_k, d, value_dim = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*sizes):
        return torch.randn(*sizes, generator=generator, device="cuda").to(dtype)

    return draw(b, s_q, h, d).transpose(1, 2), draw(b, kv_heads, s_k, d), draw(b, kv_heads, s_k, value_dim)


def by_kernel(*arguments, **keywords):
    with torch.no_grad(), options.override(tier="triton", probe=False), ops.recording() as routes:
        output = ops.decode_attention(*arguments, **keywords)
    assert [route.tier for route in routes] == ["triton"]
    return output


# Every entry: shape, lengths, starts, other arguments.
CASES = {
    "llama": ((2, 32, 8, 1, 1000, 128, 128), [1000, 63], None, {}),
    "padded": ((2, 32, 8, 1, 5000, 128, 128), [4999, 1], [100, 0], {}),
    "speculative": ((2, 16, 2, 5, 700, 80, 80), [700, 63], [3, 61], {"window": 50}),
    "rolling": ((1, 8, 8, 16, 300, 64, 64), [900], [650], {"window": 200}),
    "gpt-oss": ((2, 64, 8, 1, 333, 64, 64), [333, 20], None, {"sinks": True, "window": 128}),
    "gemma": ((1, 8, 4, 1, 3000, 256, 256), [2777], None, {"softcap": 50.0, "window": 1024}),
    "one program per head": ((40, 32, 8, 1, 40, 128, 128), [40], None, {"sinks": True}),
    "unequal dims": ((1, 4, 2, 3, 500, 192, 112), [499], [7], {}),
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_correct_and_hidden_keys_are_not_read(case, dtype):
    shape, lengths, starts, terms = case
    query, key, value = tensors(shape, dtype)
    lengths = torch.tensor(lengths, device="cuda")
    starts = None if starts is None else torch.tensor(starts, device="cuda")
    settings = {
        "scale": shape[5] ** -0.5,
        "starts": starts,
        "window": terms.get("window"),
        "softcap": terms.get("softcap"),
    }
    sinks = torch.linspace(-2, 2, shape[1], device="cuda", dtype=dtype) if terms.get("sinks") else None
    eager = eager_decode(query, key, value, lengths, sinks=sinks, **settings)
    wide = (tensor.double() for tensor in (query, key, value))
    expected = eager_decode(*wide, lengths, sinks=None if sinks is None else sinks.double(), **settings)
    seen = seen_keys(shape[3], shape[4], lengths, starts, settings["window"])[:, 0].any(1)
    unseen = ~seen.expand(shape[0], -1)[:, None, :, None]
    output = by_kernel(
        query,
        key.masked_fill(unseen, torch.nan),
        value.masked_fill(unseen, torch.nan),
        lengths,
        sinks=sinks,
        **settings,
    )
    assert_as_good_as_eager(output, eager, expected)


def test_a_recorded_graph_reads_the_current_lengths():
    query, key, value = tensors((2, 32, 8, 1, 3000, 128, 128), BF16)
    lengths, starts = torch.tensor([900], device="cuda"), torch.tensor([0, 37], device="cuda")
    by_kernel(query, key, value, lengths, scale=0.1, starts=starts)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = by_kernel(query, key, value, lengths, scale=0.1, starts=starts)
    for length in (900, 901, 2999, 3000):
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(output, by_kernel(query, key, value, lengths, scale=0.1, starts=starts))


@pytest.mark.parametrize("mask", [None, torch.bool, BF16], ids=str)
@pytest.mark.parametrize("few_queries", [False, True])
def test_every_kind_of_attention_passes_its_check(few_queries, mask):
    device = torch.device("cuda", torch.cuda.current_device())
    dims = (BF16, device, 32, 8, 128, 128)
    spec = AttentionSpec(
        *dims, not few_queries, False, False, mask is None, None, False, False, mask, False, False, few_queries
    )
    assert probe_cases.check("attention", "triton", "decode_kernel", tuple(spec)) is None
    decoding = DecodeSpec(*dims, False, False, False, not few_queries, True, True, 100)
    assert probe_cases.check("decode_attention", "triton", "decode_kernel", tuple(decoding)) is None
