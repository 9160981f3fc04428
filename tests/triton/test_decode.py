"""Decode attention in the split kernel, compared with the float64 oracle.

Hidden keys are NaN, which reveals kernels that read them, even with a weight of zero.
"""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import probe_cases
from hf_rocm.ops.attention_eager import attention as eager_attention
from hf_rocm.ops.decode import eager_decode, seen_keys
from hf_rocm.ops.mask_patterns import CacheRows, recognise
from hf_rocm.ops.specs.attention import AttentionSpec, DecodeSpec
from hf_rocm.ops.triton import decode
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import check_more_keys, compiled_once, random, routed, windows, with_gaps

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# on a GPU, fp32 is left to PyTorch
SERVED = [FP32, BF16, FP16] if suite.gpu() is None else [BF16, FP16]
USUAL = SERVED[0]
every_dtype = pytest.mark.parametrize("dtype", SERVED, ids=str)
# numbers of keys; in machine code, with 789 keys, the loop of each of four splits takes several iterations
LONGER = (149,) if suite.gpu() is None else (149, 789)


@pytest.fixture(autouse=True)
def several_splits(monkeypatch):
    """Simulate 8 compute units, so that there are more programs than heads, and partial results are combined."""
    monkeypatch.setattr(decode, "units", lambda device: 8)
    decode._work.cache_clear()


def tensors(shape, dtype):
    b, h, kv_heads, s_q, s_k, d, value_dim = shape
    # The query has the layout of a projection's output.
    query = random(b, s_q, h, d, dtype=dtype).transpose(1, 2)
    return (
        query,
        random(b, kv_heads, s_k, d, dtype=dtype, seed=1),
        random(b, kv_heads, s_k, value_dim, dtype=dtype, seed=2),
    )


def check(shape, lengths, *, dtype=USUAL, **terms):
    """Compare once, and in machine code again with more keys, so that loops take several iterations."""
    output = check_once(shape, lengths, dtype=dtype, **terms)
    if suite.gpu() is not None:
        b, h, kv_heads, s_q, s_k, *dims = shape
        # 0 units result in one split, and 8 in several.
        for units, more in ((0, 256), (8, 2048)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decode, "units", lambda device, units=units: units)
                decode._work.cache_clear()
                longer = [length + more for length in lengths]
                for wide in windows(terms, more):
                    check_once((b, h, kv_heads, s_q, s_k + more, *dims), longer, dtype=dtype, **wide)
        decode._work.cache_clear()
    return output


def check_once(shape, lengths, *, dtype=USUAL, starts=None, window=None, softcap=None, sinks=False):
    """Compare the kernel, on a cache whose hidden keys are NaN, with the oracle on the same cache without NaN."""
    query, key, value = tensors(shape, dtype)
    s_q, s_k, d = query.shape[2], key.shape[2], query.shape[3]
    lengths = torch.tensor(lengths, dtype=torch.int32)
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    terms = {"scale": d**-0.5, "starts": starts, "window": window, "softcap": softcap}
    sink = random(shape[1], dtype=dtype, seed=3) if sinks else None
    eager = eager_decode(query, key, value, lengths, sinks=sink, **terms)
    wide = (tensor.double() for tensor in (query, key, value))
    expected = eager_decode(*wide, lengths, sinks=None if sink is None else sink.double(), **terms)
    unseen = ~seen_keys(s_q, s_k, lengths, starts, window).any(2).transpose(1, 2).expand(len(key), s_k, 1)[:, None]
    key, value = key.masked_fill(unseen, torch.nan), with_gaps(value.masked_fill(unseen, torch.nan))
    output = routed("decode_attention", query, key, value, lengths, sinks=sink, **terms)
    assert output.is_contiguous()
    assert_as_good_as_eager(output, eager, expected)
    return output


SHAPES = {  # B, H, Hkv, S_q, S, D, D_v; the lengths of the rows
    "one key": ((1, 1, 1, 1, 1, 64, 64), [1]),
    "63": ((2, 4, 2, 1, 63, 64, 64), [63, 1]),
    "one block and one": ((2, 4, 2, 1, 65, 128, 128), [65, 64]),
    "many blocks": ((2, 4, 1, 1, 700, 64, 64), [699, 130]),
    "shared length": ((3, 2, 2, 1, 100, 64, 64), [77]),
    "large group": ((1, 40, 1, 1, 70, 64, 64), [69]),
    "80": ((1, 4, 2, 1, 90, 80, 80), [83]),
    "96": ((1, 4, 2, 1, 90, 96, 96), [83]),
    "112": ((1, 4, 2, 1, 90, 112, 112), [83]),
    "192 and 128": ((1, 2, 2, 1, 70, 192, 128), [65]),
    "256": ((1, 2, 1, 1, 70, 256, 256), [65]),
    "tiny": ((2, 4, 2, 1, 40, 8, 12), [37, 5]),
}


@every_dtype
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_single_queries(shape, dtype):
    if max(shape[0][5:]) > 128 and (suite.arch() or "").startswith("gfx11"):
        with pytest.raises(TierUnavailable, match="spill registers"):
            check(*shape, dtype=dtype)
        return
    check(*shape, dtype=dtype)


@pytest.mark.skipif(suite.gpu() is None, reason="fp32 is refused only on GPUs")
def test_fp32_is_refused_on_a_gpu():
    with pytest.raises(TierUnavailable, match="exponential"):
        check((1, 1, 1, 1, 1, 64, 64), [1], dtype=FP32)


@pytest.mark.parametrize("s_q", [2, 3, 7, 15, 16])
def test_several_queries_are_causal_among_themselves(s_q):
    check((2, 6, 2, s_q, 150, 32, 32), [149, s_q])


def test_more_rows_than_a_block_are_supported():
    check((1, 8, 1, 16, 70, 16, 16), [66], dtype=BF16)


@pytest.mark.parametrize("s_q", [1, 4])
@pytest.mark.parametrize("starts", [[0, 0], [5, 60], [99, 128]], ids=str)
def test_left_padding_is_skipped(starts, s_q):
    """Some rows have only one real key. Padding queries have no keys, so their outputs are zero."""
    output = check((2, 4, 2, s_q, 130, 32, 32), [100, 129], starts=starts)
    if starts[0] == 99 and s_q == 4:
        assert torch.equal(output[:, :3], torch.zeros_like(output[:, :3]))
        assert output[:, 3].abs().min() > 0


@pytest.mark.parametrize("s_q", [1, 4])
@pytest.mark.parametrize("window", [1, 63, 64, 500])
def test_windows_hide_distant_keys(window, s_q):
    check((2, 4, 2, s_q, 200, 32, 32), [199, 40], window=window)


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("length", [64, 65, 300])
def test_a_rolling_cache_has_the_last_keys(length, s_q):
    """Lengths and starts count all keys, although the cache dropped or moved the first ones."""
    check((2, 4, 2, s_q, 64, 32, 32), [length, length], starts=[20, length - 10], window=64)


@every_dtype
@pytest.mark.parametrize(
    "terms", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True, "window": 50}], ids=str
)
@pytest.mark.parametrize("s_q", [1, 5])
def test_softcap_and_sinks(s_q, terms, dtype):
    check((2, 4, 2, s_q, 140, 64, 64), [139, 20], dtype=dtype, **terms)


@pytest.mark.parametrize("factor", [1e4, 1])
def test_the_softcap_of_large_scores_is_finite(factor):
    check_softcap(*(tensor * factor for tensor in tensors((1, 2, 1, 1, 40, 32, 32), USUAL)))


def test_every_key_can_have_all_the_weight(monkeypatch):
    """Every row of the batch attends to a different key, so a wrong weight of any key changes the output."""
    # Use one split.
    monkeypatch.setattr(decode, "units", lambda device: 0)
    decode._work.cache_clear()
    query, key, value = tensors((127, 2, 1, 1, 127, 32, 32), USUAL)
    check_softcap(
        torch.ones_like(query), torch.eye(127, dtype=USUAL)[:, None, :, None].expand_as(key).contiguous(), value
    )


def check_softcap(query, key, value):
    lengths = torch.tensor([key.shape[2]])
    output = routed("decode_attention", query, key, value, lengths, scale=1.0, softcap=30.0)
    eager, expected = (
        eager_decode(*call, lengths, scale=1.0, softcap=30.0, sinks=None)
        for call in ((query, key, value), (query.double(), key.double(), value.double()))
    )
    assert_as_good_as_eager(output, eager, expected)


@pytest.mark.parametrize("units", [1, 8])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_without_keys_is_zero(units, sinks, monkeypatch):
    monkeypatch.setattr(decode, "units", lambda device: units)
    decode._work.cache_clear()
    query, key, value = tensors((2, 4, 2, 1, 690, 16, 16), USUAL)
    starts = torch.tensor([0, 690])
    sink = torch.zeros(4, dtype=USUAL) if sinks else None
    output = routed("decode_attention", query, key, value, torch.tensor([690]), scale=0.3, starts=starts, sinks=sink)
    assert torch.equal(output[1], torch.zeros_like(output[1])) and output[0].abs().min() > 0


@pytest.mark.parametrize("sinks", [False, True])
def test_one_program_per_head_needs_no_second_kernel(sinks, monkeypatch):
    monkeypatch.setattr(decode, "units", lambda device: 1)
    decode._work.cache_clear()
    shape = (2, 4, 2, 3, 150, 32, 24)
    assert decode.plan(2, 2, 6, 150, 32, 4, 1, None).splits == 1
    check(shape, [149, 30], sinks=sinks, softcap=2.0)


@every_dtype
@pytest.mark.parametrize("per", ["row", "head", "query", "all"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks(kind, per, dtype):
    for keys in LONGER:
        check_mask((2, 4, 2, 3, keys + 1, 32, 32), kind, per, dtype)


def check_mask(shape, kind, per, dtype):
    b, h, _, s_q, s_k, d, _ = shape
    query, key, value = tensors(shape, dtype)
    sizes = {"row": (b, 1, s_q), "head": (b, h, s_q), "query": (1, 1, s_q), "all": (1, 1, 1)}[per]
    mask = torch.rand(*sizes, s_k + 3, generator=torch.Generator().manual_seed(4)) > 0.4
    # No query attends to this block.
    mask[..., 64:128] = False
    mask[..., 0] = True
    hidden = ~mask[..., :s_k].flatten(0, -2).any(0)
    if kind == "additive":
        bias = random(*mask.shape, dtype=dtype, seed=5)
        mask = bias.masked_fill(~mask, torch.finfo(dtype).min)
    terms = {"scale": d**-0.5, "causal": True, "window": s_k - 1, "softcap": None, "sinks": None}
    eager, _ = eager_attention(query, key, value, mask=mask, **terms)
    wide = mask.double() if kind == "additive" else mask
    expected, _ = eager_attention(*(tensor.double() for tensor in (query, key, value)), mask=wide, **terms)
    key, value = (tensor.masked_fill(hidden[:, None], torch.nan) for tensor in (key, value))
    output, weights = routed("attention", query, key, value, mask=mask, **terms)
    assert weights is None
    assert_as_good_as_eager(output, eager, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 6])
def test_dynamic_caches_and_cross_attention(s_q, causal):
    for keys in LONGER:
        query, key, value = tensors((2, 4, 2, s_q, keys, 32, 48), USUAL)
        terms = {"scale": 0.2, "causal": causal, "mask": None, "window": keys - 79, "softcap": None, "sinks": None}
        output, _ = routed("attention", query, key, value, **terms)
        expected, _ = eager_attention(*(tensor.double() for tensor in (query, key, value)), **terms)
        assert_as_good_as_eager(output, eager_attention(query, key, value, **terms)[0], expected)


def test_any_strides_are_supported():
    """Caches with the positions before the heads in memory, views of a longer cache, and strided columns."""
    query, key, value = tensors((2, 4, 2, 1, 690, 32, 32), USUAL)
    lengths = torch.tensor([680, 3])
    expected = routed("decode_attention", query, key, value, lengths, scale=0.2)
    by_position = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (key, value)]
    part = [torch.cat((tensor, tensor), 2)[:, :, :690] for tensor in (key, value)]
    strided = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (key, value)]
    for pair in (by_position, part, strided):
        assert not any(tensor.is_contiguous() for tensor in pair)
        assert torch.equal(routed("decode_attention", query, *pair, lengths, scale=0.2), expected)


def test_lengths_are_read_at_run_time():
    """Call again after the lengths were advanced in place, as in a recorded graph."""
    query, key, value = tensors((2, 4, 2, 1, 200, 32, 32), USUAL)
    lengths, starts = torch.tensor([70, 150]), torch.tensor([0, 149])
    for _ in range(2):
        output = routed("decode_attention", query, key, value, lengths, scale=0.2, starts=starts)
        terms = {"scale": 0.2, "starts": starts, "softcap": None, "sinks": None}
        expected = eager_decode(*(tensor.double() for tensor in (query, key, value)), lengths, **terms)
        assert_as_good_as_eager(output, eager_decode(query, key, value, lengths, **terms), expected)
        lengths += 49
        starts -= 60


def test_empty_batches_and_calls_without_keys_are_supported(monkeypatch):
    query, key, value = tensors((2, 4, 2, 1, 405, 16, 16), USUAL)
    assert routed("attention", query[:0], key[:0], value[:0], scale=1.0)[0].shape == (0, 1, 4, 16)
    output, _ = routed("attention", query, key[:, :, :0], value[:, :, :0], scale=1.0)
    assert torch.equal(output, torch.zeros(2, 1, 4, 16, dtype=USUAL))
    # Use one split, like the call without keys.
    monkeypatch.setattr(decode, "units", lambda device: 0)
    decode._work.cache_clear()
    output, _ = routed("attention", query, key, value, scale=1.0)
    terms = {"scale": 1.0, "causal": False, "mask": None, "window": None, "softcap": None, "sinks": None}
    expected, _ = eager_attention(*(tensor.double() for tensor in (query, key, value)), **terms)
    assert_as_good_as_eager(output, eager_attention(query, key, value, **terms)[0], expected)


HEADS = {"dtype": USUAL, "device": CPU, "heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
DENSE = AttentionSpec(
    **HEADS,
    one_query=True,
    square=False,
    more_queries=False,
    causal=False,
    window=None,
    softcap=False,
    sinks=False,
    mask=None,
    grad=False,
    weights=False,
)
PLAIN = DecodeSpec(**HEADS, softcap=False, sinks=False, grad=False)
# The kernel's specifications: two of `attention`, three of `decode_attention`.
FORMS = {
    "attention, dynamic cache": DENSE,
    "attention, mask": DENSE._replace(
        one_query=False, few_queries=True, window=5, softcap=True, sinks=True, mask=torch.bool
    ),
    "decode_attention, plain": PLAIN,
    "decode_attention, padded": PLAIN._replace(softcap=True, sinks=True, starts=True),
    "decode_attention, several": PLAIN._replace(value_dim=12, one_query=False, starts=True, window=5),
}


@pytest.mark.parametrize("name", FORMS)
def test_first_use_checks_pass_and_detect_a_wrong_result(name, monkeypatch):
    operation, kind = name.partition(",")[0], tuple(FORMS[name])
    assert probe_cases.check(operation, "triton", "decode_kernel", kind) is None
    stock = decode._traced
    monkeypatch.setattr(decode, "_traced", lambda *arguments: stock(*arguments) + 1)
    assert "wrong by" in probe_cases.check(operation, "triton", "decode_kernel", kind)
    if operation == "decode_attention":
        monkeypatch.setattr(decode, "_traced", lambda q, k, v, lengths, *rest: stock(q, k, v, lengths + 1, *rest))
        assert "wrong by" in probe_cases.check(operation, "triton", "decode_kernel", kind)
    monkeypatch.setattr(decode, "_traced", stock)
    check_more_keys(monkeypatch, operation, "decode_kernel", FORMS[name])


def test_it_is_one_op_of_a_compiled_graph():
    query, key, value = tensors((1, 4, 2, 1, 1070, 16, 16), USUAL)
    lengths = torch.tensor([1066])

    def call(*arguments):
        return ops.decode_attention(*arguments, scale=0.2, softcap=2.0)

    assert "hf_rocm.triton_decode.default" in compiled_once(call, query, key, value, lengths)


def test_a_padded_step_is_served_with_its_mask_or_with_lengths():
    """A mask that the kernel supports is not converted to lengths, because the host would have to read the mask."""
    query, key, value = tensors((2, 4, 2, 1, 90, 32, 32), USUAL)
    lengths, starts = torch.tensor([90]), torch.tensor([0, 85])
    mask = seen_keys(1, 90, lengths, starts, None)
    with torch.no_grad(), ops.recording() as routes:
        assert recognise(mask, query, key, value) is None
        by_mask, _ = ops.attention(query, key, value, scale=0.2, mask=mask)
        by_numbers, _ = ops.attention(query, key, value, scale=0.2, padded=CacheRows(lengths, starts))
    assert [(route.operation, route.tier) for route in routes] == [
        ("attention", "triton"),
        ("decode_attention", "triton"),
    ]
    torch.testing.assert_close(by_mask, by_numbers)


@pytest.mark.parametrize("dtype", [torch.bool, USUAL], ids=str)
def test_a_mask_may_have_one_element_for_all_keys(dtype):
    """In MiniMax, the mask of a step has one key, because the first layer has no keys. SDPA expands this mask."""
    query, key, value = (random(2, 2, s, 16, dtype=USUAL, seed=s) for s in (1, 9, 10))
    value = value[:, :, :9]
    # The following elements would hide keys.
    memory = torch.zeros(2, 1, 1, 64, dtype=dtype)
    memory[..., 1:] = 0 if dtype == torch.bool else torch.finfo(dtype).min
    memory[..., :1] = 1 if dtype == torch.bool else 0
    mask = memory[..., :1]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    with options.override(tier="attention=triton"):
        output, _ = ops.attention(query, key, value, scale=0.3, mask=mask)
    tolerance = 1e-4 if USUAL == FP32 else 2e-2
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=tolerance, atol=tolerance)
    with options.override(tier="attention=triton"), pytest.raises(OptionError, match="3 keys can't be used for 9"):
        ops.attention(query, key, value, scale=0.3, mask=memory[..., :3])


@pytest.mark.skipif(suite.gpu() is not None, reason="with machine code, new tensors are NaN in every test")
def test_partial_results_that_no_program_wrote_are_not_used(monkeypatch):
    deterministic = torch.are_deterministic_algorithms_enabled()
    # This setting fills new tensors with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        check_once((2, 4, 2, 1, 300, 64, 64), (1, 70))
    finally:
        torch.use_deterministic_algorithms(deterministic)
