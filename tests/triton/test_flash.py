"""Attention with many queries in the flash kernel, compared with the float64 oracle.

In dense calls, keys beyond the last one are NaN, which reveals kernels that read them, even with a weight of zero.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from hf_rocm import ops
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import probe_cases
from hf_rocm.ops.attention_eager import attention as eager_attention
from hf_rocm.ops.specs.attention import AttentionSpec, VarlenSpec
from hf_rocm.ops.triton import flash
from hf_rocm.ops.triton.tiles import FlashTile, flash_tile
from hf_rocm.ops.varlen import eager_varlen
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, here, random, routed, with_gaps

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# on a GPU, fp32 is left to PyTorch
SERVED = [FP32, BF16, FP16] if suite.gpu() is None else [BF16, FP16]
USUAL = SERVED[0]
every_dtype = pytest.mark.parametrize("dtype", SERVED, ids=str)


# number of tokens; machine code has larger tiles, so it needs more for several iterations of the loops
LONGER = 20 if suite.gpu() is None else 290


@pytest.fixture(autouse=True)
def several_tiles(request, monkeypatch):
    """In the interpreter, use tiles so small that even short sequences span several tiles."""
    if suite.gpu() is None:
        monkeypatch.setattr(flash, "flash_tile", lambda dim, size, arch: FlashTile(16, 16, 4, 2))


def wide(*parts):
    return [None if part is None else part.double() for part in parts]


def check(heads, dims, queries, keys, **terms):
    """Compare once, and in machine code also with more queries than keys, and with more tokens for more iterations."""
    output = check_once(heads, dims, queries, keys, **terms)
    if suite.gpu() is not None:
        check_once(heads, dims, [keys[0] + 7, *queries[1:]], keys, **terms)
        check_once(heads, dims, [queries[0] + 130, *queries[1:]], [keys[0] + 290, *keys[1:]], **terms)
    return output


def check_once(
    heads, dims, queries, keys, *, dtype=USUAL, sinks=False, causal=True, window=None, softcap=None, lse=False
):
    """Compare the kernel with the oracle, for packed sequences of these lengths that are followed by unused rows."""
    (h, kv_heads), (d, value_dim) = heads, dims
    query = random(sum(queries) + 3, h, d, dtype=dtype)
    key = random(sum(keys), kv_heads, d, dtype=dtype, seed=1)
    value = with_gaps(random(sum(keys), kv_heads, value_dim, dtype=dtype, seed=2))
    ends = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys)]
    sink = random(h, dtype=dtype, seed=3) if sinks else None
    terms = {"longest_query": max(queries), "longest_key": max(keys), "scale": d**-0.5}
    terms |= {"causal": causal, "window": window, "softcap": softcap, "lse": lse}
    real = query[: sum(queries)]
    eager = eager_varlen(real, key, value, *ends, sinks=sink, **terms)
    expected = eager_varlen(*wide(real, key, value), *ends, sinks=None if sink is None else sink.double(), **terms)
    output = routed("varlen_attention", query, key, value, *ends, sinks=sink, **terms)
    if lse:
        (output, sums), (eager, eager_sums), (expected, oracle) = output, eager, expected
        assert sums.shape == (len(query), h) and sums.dtype == torch.float32 and sums.is_contiguous()
        assert (sums[len(real) :] == -torch.inf).all() and torch.equal(sums[: len(real)].isinf(), oracle.isinf())
        assert_as_good_as_eager(
            *(part.masked_fill(oracle.isinf(), 0) for part in (sums[: len(real)], eager_sums, oracle))
        )
    assert output.shape == (len(query), h, value_dim) and output.is_contiguous()
    assert torch.equal(output[len(real) :], torch.zeros_like(output[len(real) :]))
    assert_as_good_as_eager(output[: len(real)], eager, expected)
    return output


# Every entry: H and Hkv, D and D_v, the number of queries per sequence, the number of keys per sequence.
PACKED = {
    "one token": ((1, 1), (64, 64), [1], [1]),
    "63 and 1": ((4, 2), (64, 64), [63, 1], [63, 1]),
    "mixed step": ((4, 1), (32, 32), [1, 37, 1, 1, 20], [50, 37, 1, 17, 65]),
    "group of 7": ((7, 1), (64, 64), [9, 0, 30], [9, 0, 31]),
    "no group": ((3, 3), (80, 80), [17, 16], [17, 33]),
    "empty at the end": ((2, 1), (32, 32), [5, 18, 0, 0], [5, 20, 0, 0]),
    "96": ((2, 1), (96, 96), [20], [33]),
    "128": ((2, 2), (128, 128), [33], [34]),
    "192 and 128": ((1, 1), (192, 128), [18], [18]),
    "256": ((2, 1), (256, 256), [18], [19]),
    "tiny": ((2, 1), (8, 12), [18], [18]),
}


@every_dtype
@pytest.mark.parametrize("shape", PACKED.values(), ids=PACKED)
def test_packed_sequences(shape, dtype):
    if max(shape[1]) > 128 and (suite.arch() or "").startswith("gfx11"):
        with pytest.raises(TierUnavailable, match="spill registers"):
            check(*shape, dtype=dtype)
        return
    check(*shape, dtype=dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 15, 16, 40, 500])
def test_windows_hide_distant_keys(window, causal):
    check((4, 2), (32, 32), [40, 3, 21], [90, 40, 21], window=window, causal=causal)


@every_dtype
@pytest.mark.parametrize(
    "terms", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True, "window": 20}], ids=str
)
def test_softcap_and_sinks(terms, dtype):
    check((4, 2), (64, 64), [37, 2], [37, 40], dtype=dtype, **terms)


@every_dtype
@pytest.mark.parametrize(
    "terms",
    [{}, {"sinks": True}, {"causal": False, "softcap": 2.0}, {"softcap": 3.0, "sinks": True, "window": 20}],
    ids=str,
)
def test_log_sum_exp(terms, dtype):
    """In causal calls, some queries of the second sequence attend to no keys. The third sequence has no keys."""
    check((4, 2), (64, 64), [37, 8, 3, 2], [37, 5, 0, 40], dtype=dtype, lse=True, **terms)


@pytest.mark.parametrize("causal", [True, False])
def test_causal_queries_before_the_first_key_return_zeros(causal):
    """Causal queries before the first key attend to no keys, so their outputs are zero, even with a sink."""
    for sinks in (False, True):
        output = check((2, 1), (32, 32), [21], [5], causal=causal, sinks=sinks)
        assert (output[:16] == 0).all() == causal and (output[16:21] != 0).all()


@pytest.mark.parametrize("sequences", [1, 2, 3, 8, 9, 33])
def test_every_number_of_sequences_is_supported(sequences):
    lengths = [(7 * n) % 23 for n in range(sequences)]
    lengths[0] = 5
    check((2, 1), (16, 16), lengths, [length + n % 3 for n, length in enumerate(lengths)])


@every_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("s_q", "s_k"), [(33, 33), (17, 60), (40, 21), (20, 1), (17, 0), (130, 290)])
def test_dense(s_q, s_k, causal, dtype):
    window = 9 if s_k == 60 else None
    check_dense(s_q, s_k, causal, dtype, window)
    # Run the same compiled variant with several iterations of the loops.
    if suite.gpu() is not None:
        check_dense(130, 290, causal, dtype, window and window + 240)


def check_dense(s_q, s_k, causal, dtype, window):
    # The query has the layout of a projection's output.
    query = random(2, s_q, 6, 32, dtype=dtype).transpose(1, 2)
    key, value = (random(2, 2, s_k + 6 + seed, 32, dtype=dtype, seed=seed) for seed in (1, 2))
    hidden = key.clone(), value.clone()
    for tensor in hidden:
        tensor[:, :, s_k:] = torch.nan
    terms = {"scale": 0.2, "causal": causal, "mask": None, "window": window, "softcap": 2.0}
    key, value = key[:, :, :s_k], value[:, :, :s_k]
    if s_k:
        eager, _ = eager_attention(query, key, value, sinks=None, **terms)
        expected, _ = eager_attention(*wide(query, key, value), sinks=None, **terms)
    else:
        eager = expected = torch.zeros(2, s_q, 6, 32, dtype=dtype)
    output, weights = routed("attention", query, *(tensor[:, :, :s_k] for tensor in hidden), sinks=None, **terms)
    assert weights is None and output.is_contiguous()
    assert_as_good_as_eager(output, eager, expected.double())


def test_any_strides_and_empty_batches_are_supported():
    query, key, value = (random(2, heads, LONGER, 32, dtype=USUAL, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    expected, _ = routed("attention", query, key, value, scale=0.2, causal=True, softcap=2.0)
    strided = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (query, key, value)]
    assert torch.equal(routed("attention", *strided, scale=0.2, causal=True, softcap=2.0)[0], expected)
    assert routed("attention", query[:0], key[:0], value[:0], scale=1.0)[0].shape == (0, LONGER, 4, 32)


def test_ends_are_read_at_run_time():
    """Call again after the ends were changed in place, as in a recorded graph of a batch."""
    query, key = random(40, 2, 16, dtype=USUAL), random(50, 1, 16, dtype=USUAL, seed=1)
    ends = torch.tensor([0, 30, 31, 40], dtype=torch.int32)
    terms = {"longest_query": 40, "longest_key": 50, "scale": 0.2, "causal": True, "softcap": None, "window": None}
    for change in ([0, 0, 0, 0], [0, -25, 5, -2]):
        ends += torch.tensor(change, dtype=torch.int32)
        output = routed("varlen_attention", query, key, key, ends, ends, **terms)
        expected = eager_varlen(*wide(query, key, key), ends, ends, sinks=None, **terms)
        eager = eager_varlen(query, key, key, ends, ends, sinks=None, **terms)
        assert_as_good_as_eager(output, eager, expected)


HEADS = {"dtype": USUAL, "device": CPU, "heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
DENSE = AttentionSpec(
    **HEADS,
    one_query=False,
    square=True,
    more_queries=False,
    causal=True,
    window=None,
    softcap=False,
    sinks=False,
    mask=None,
    grad=False,
    weights=False,
)
PACK = VarlenSpec(**HEADS, causal=True, window=None, softcap=False, sinks=False, grad=False)


@pytest.mark.parametrize(
    ("operation", "spec"),
    [
        ("attention", DENSE._replace(softcap=True)),
        ("varlen_attention", PACK),
        ("varlen_attention", PACK._replace(sinks=True, window=5, value_dim=12)),
        ("varlen_attention", PACK._replace(lse=True)),
    ],
    ids=["dense", "packed", "packed, all terms", "packed, log-sum-exp"],
)
def test_first_use_checks_pass_and_detect_a_wrong_result(operation, spec, monkeypatch):
    assert probe_cases.check(operation, "triton", "flash_kernel", tuple(spec)) is None
    stock = flash._traced
    # Pass a wrong window.
    monkeypatch.setattr(flash, "_traced", lambda *arguments: stock(*arguments[:-2], 3, arguments[-1]))
    assert "wrong by" in probe_cases.check(operation, "triton", "flash_kernel", tuple(spec))


REFUSED = {
    "weights": (DENSE._replace(weights=True), "weights"),
    "mask": (DENSE._replace(mask=torch.bool), "mask"),
    "one query": (DENSE._replace(one_query=True), "split the keys"),
    "gradient": (DENSE._replace(grad=True), "gradient"),
    "dtype": (DENSE._replace(dtype=torch.float64), "float64"),
    "head dim": (DENSE._replace(head_dim=320), "at most 256"),
}


@pytest.mark.parametrize(("spec", "match"), REFUSED.values(), ids=REFUSED)
def test_unsupported_attention_is_refused(spec, match):
    assert match in flash.attention_refuses(spec, here())
    served = spec._replace(
        weights=False, mask=None, one_query=False, grad=False, dtype=USUAL, head_dim=min(spec.head_dim, 16)
    )
    assert served == DENSE and (suite.gpu() is not None or flash.attention_refuses(served, here()) is None)


def test_unsupported_packed_sequences_are_refused():
    assert "gradient" in flash.refuses(PACK._replace(grad=True), here())
    assert flash.refuses(PACK, here()) is None


def test_tiles_of_architectures_differ_if_their_registers_do():
    assert flash_tile(128, 2, None).rows >= flash_tile(128, 2, "gfx942").rows > flash_tile(128, 2, "gfx1201").rows
    assert flash_tile(128, 2, "gfx1100").keys < flash_tile(128, 2, "gfx1201").keys
    assert flash_tile(256, 2, None).rows < flash_tile(128, 2, None).rows


def test_it_is_one_op_of_a_compiled_graph():
    query, ends = random(LONGER, 2, 16, dtype=USUAL), torch.tensor([0, 7, LONGER], dtype=torch.int32)

    def call(query, ends):
        return ops.varlen_attention(
            query, query, query, ends, ends, longest_query=LONGER - 7, longest_key=LONGER - 7, scale=0.2, causal=True
        )

    assert "hf_rocm.triton_flash.default" in compiled_once(call, query, ends)
