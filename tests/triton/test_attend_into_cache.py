"""A step of one or a few tokens in one kernel: norms, rotation, the write to the cache and attention.

The kernel must agree with the two operations that it replaces. All rows that it must not read are NaN before the call.
"""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import probe_cases
from hf_rocm.ops.attend_into_cache import _triton_refuses
from hf_rocm.ops.specs.attention import AttendIntoCacheSpec
from hf_rocm.ops.triton import attend_into_cache, decode
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import check_more_keys, compiled_once, here, random, routed, with_gaps
from tests.triton.test_rope import angles

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# On a GPU, fp32 is left to PyTorch.
SERVED = [FP32, BF16, FP16] if suite.gpu() is None else [BF16, FP16]
every_dtype = pytest.mark.parametrize("dtype", SERVED, ids=str)
OPERATION, KERNEL = "attend_into_cache", "decode_kernel, new keys"


@pytest.fixture(autouse=True)
def several_splits(monkeypatch):
    """Simulate 8 compute units, so that there are more programs than heads, and partial results are combined."""
    splits(monkeypatch, 8)


def splits(monkeypatch, units):
    monkeypatch.setattr(decode, "units", lambda device: units)
    decode._work.cache_clear()


def tensors(shape, dtype, *, tokens=1, rotated=None, once=False, tables=1, norm=None):
    """Heads as views of a fused projection, angles, a cache with random rows, and the weights of norms or None."""
    b, h, kv_heads, size, d, value_dim = shape
    widths = h * d, kv_heads * d, kv_heads * value_dim
    parts = random(b, tokens, sum(widths), dtype=dtype).split(widths, -1)
    heads = [part.unflatten(-1, (-1, dim)).transpose(1, 2) for part, dim in zip(parts, (d, d, value_dim), strict=True)]
    positions = angles(tables, tokens, rotated or d, dtype)
    if once:
        positions = tuple(angle[..., : (rotated or d) // 2] for angle in positions)
    keys = random(b, kv_heads, size, d, dtype=dtype, seed=1)
    values = random(b, kv_heads, size, value_dim, dtype=dtype, seed=2)
    weights = None if norm is None else [random(d, dtype=norm, seed=seed) / 2 + 1 for seed in (5, 6)]
    return [*heads, *positions], keys, values, weights


def check(
    shape,
    length,
    *,
    dtype=SERVED[0],
    tokens=1,
    rotated=None,
    once=False,
    tables=1,
    norm=None,
    one_plus=False,
    starts=None,
    window=None,
    softcap=None,
    sinks=False,
):
    """Compare with the eager tier in the same dtype and in fp64, whose caches have no NaN. Returns the output."""
    layout = {"rotated": rotated, "once": once, "tables": tables, "norm": norm}
    inputs, keys, values, weights = tensors(shape, dtype, tokens=tokens, **layout)
    size = shape[3]
    end = min(length, size)
    written = slice(end - tokens, end)
    before = torch.zeros(shape[0], dtype=torch.int64) if starts is None else torch.tensor(starts)
    first = (before - (length - end)).clamp(min=max(0, 0 if window is None else end - tokens + 1 - window))
    places = torch.arange(size)
    read = (places >= first[:, None]) & (places < end - tokens)
    terms = {
        "lengths": torch.tensor([length]),
        "position": places[written],
        "scale": shape[4] ** -0.5,
        "starts": None if starts is None else torch.tensor(starts, dtype=torch.int32),
        "window": window,
        "softcap": softcap,
        "once": once,
    }
    results = {}
    conversions = {"kernel": torch.Tensor.clone, "eager": torch.Tensor.clone, "exact": torch.Tensor.double}
    for name, convert in conversions.items():
        norms = None
        if weights is not None:
            norms = tuple(
                ops.Norm(convert(weight), eps, one_plus) for weight, eps in zip(weights, (1e-6, 1e-2), strict=True)
            )
        key_cache, value_cache = convert(keys), with_gaps(convert(values))
        if name == "kernel":
            for cache in (key_cache, value_cache):
                cache.masked_fill_(~read[:, None, :, None], torch.nan)
        sink = convert(random(shape[1], dtype=dtype, seed=3)) if sinks else None
        call = routed if name == "kernel" else eager_tier
        output = call(
            OPERATION, *map(convert, inputs), keys=key_cache, values=value_cache, sinks=sink, norms=norms, **terms
        )
        results[name] = output, key_cache[:, :, written], value_cache[:, :, written]
        if name == "kernel":
            untouched = (places < end - tokens) | (places >= end)
            for cache, original in ((key_cache, keys), (value_cache, values)):
                hidden = (~read)[:, None, :, None].expand(cache.shape)
                expected = original.masked_fill(hidden, torch.nan)[:, :, untouched]
                torch.testing.assert_close(cache[:, :, untouched], expected, rtol=0, atol=0, equal_nan=True)
    for actual, eager, exact in zip(*results.values(), strict=True):
        assert_as_good_as_eager(actual, eager, exact)
    return results["kernel"][0]


def eager_tier(operation, *arguments, **keywords):
    with options.override(tier="eager"):
        return getattr(ops, operation)(*arguments, **keywords)


def check_short_and_long(shape, length, **terms):
    """Check, and in machine code again with 2048 more keys, so that the loop over the keys has several iterations."""
    check(shape, length, **terms)
    if suite.gpu() is not None:
        b, h, kv_heads, size, *dims = shape
        check((b, h, kv_heads, size + 2048, *dims), length + 2048, **terms)


SHAPES = {  # B, H, Hkv, L, D, D_v; the length of every row
    "first token": ((1, 2, 2, 40, 64, 64), 1),
    "second token": ((2, 4, 2, 40, 64, 64), 2),
    "63": ((2, 4, 2, 63, 64, 64), 63),
    "a full block and one": ((2, 4, 2, 70, 64, 64), 65),
    "many blocks": ((2, 8, 1, 700, 64, 64), 699),
    "group of 8": ((3, 16, 2, 150, 64, 64), 133),
    "large group": ((1, 40, 1, 70, 64, 64), 69),
    "80": ((1, 4, 2, 90, 80, 80), 83),
    "96": ((1, 4, 4, 90, 96, 96), 83),
    "128": ((2, 8, 2, 150, 128, 128), 149),
    "192 and 128": ((1, 2, 2, 70, 192, 128), 65),
    "256": ((1, 2, 1, 70, 256, 256), 65),
    "tiny": ((2, 4, 2, 40, 8, 12), 37),
}


@every_dtype
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(shape, dtype):
    if max(shape[0][4:]) > 128 and (suite.arch() or "").startswith("gfx11"):
        with pytest.raises(TierUnavailable, match="spill registers"):
            check(*shape, dtype=dtype)
        return
    check_short_and_long(*shape, dtype=dtype)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES.values() if max(shape[0][4:]) <= 128], ids=str)
def test_sixteen_tokens(shape):
    check_short_and_long(*shape, dtype=BF16, tokens=min(16, shape[1]))


@pytest.mark.parametrize("units", [0, 8], ids=["one split", "several"])
@pytest.mark.parametrize(
    "terms",
    [
        {"norm": BF16},
        {"norm": BF16, "one_plus": True},
        {"norm": FP32, "one_plus": True},
        {"once": True},
        {"rotated": 16},
        {"rotated": 24, "norm": BF16, "once": True},
        {"rotated": 6, "tables": 2},
        {"window": 1},
        {"window": 63},
        {"window": 64, "norm": BF16},
        {"window": 500},
        {"softcap": 2.0},
        {"sinks": True},
        {"softcap": 3.0, "sinks": True, "window": 50, "once": True},
        {"starts": [0, 5]},
        {"starts": [60, 199], "norm": BF16},
        {"starts": [198, 199], "window": 100, "sinks": True},
        {"tokens": 2},
        {"tokens": 6, "norm": BF16, "tables": 2},
        {"tokens": 6, "once": True, "softcap": 2.0},
        {"tokens": 16, "sinks": True},
        {"tokens": 7, "window": 1},
        {"tokens": 7, "window": 3, "norm": FP32, "one_plus": True},
        {"tokens": 5, "window": 63},
        {"tokens": 5, "window": 64, "starts": [150, 197]},
        {"tokens": 6, "starts": [194, 199], "sinks": True},
    ],
    ids=str,
)
def test_terms(terms, units, monkeypatch):
    """With several tokens, a query attends to the new keys up to its own."""
    splits(monkeypatch, units)
    check_short_and_long((2, 8, 2, 210, 32, 32), 200, dtype=BF16, **terms)


@pytest.mark.parametrize("length", [64, 65, 300])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_rolling_cache_has_the_last_keys(tokens, length):
    """The new keys are written to the last rows of a full cache, whose rows the caller has moved."""
    check((2, 4, 2, 64, 32, 32), length, dtype=BF16, tokens=tokens, starts=[20, length - 10], window=65 - tokens)


def test_a_row_that_is_only_padding_is_zero():
    output = check((2, 4, 2, 130, 32, 32), 100, dtype=BF16, starts=[0, 100])
    assert torch.equal(output[1], torch.zeros_like(output[1])) and output[0].abs().min() > 0


@every_dtype
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("rotated", [64, 32])
def test_queries_and_keys_are_rotated_as_in_the_two_operations(rotated, tokens, dtype):
    """Written keys are bitwise equal. Several keys are needed, so that the output depends on the rotated query."""
    inputs, keys, values, _ = tensors((2, 8, 2, 150, 64, 64), dtype, tokens=tokens, rotated=rotated, tables=2)
    lengths, position = torch.tensor([140]), torch.arange(140 - tokens, 140)
    before = {"keys": keys.clone(), "values": values.clone(), "position": position}
    query = routed("rope_into_cache", *inputs, **before)
    separate = routed("decode_attention", query, before["keys"], before["values"], lengths, scale=0.2)
    output = routed(OPERATION, *inputs, lengths, keys=keys, values=values, position=position, scale=0.2)
    assert torch.equal(keys, before["keys"]) and torch.equal(values, before["values"])
    torch.testing.assert_close(output, separate, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 2)


def test_norms_round_like_the_layers():
    """Almost all written keys equal those of the other kernel. The order of summation may change a few."""
    inputs, keys, values, weights = tensors((4, 8, 8, 20, 64, 64), BF16, norm=BF16)
    norms = tuple(ops.Norm(weight, 1e-6) for weight in weights)
    other = {"keys": keys.clone(), "values": values.clone(), "position": torch.tensor([7]), "norms": norms}
    routed("rope_into_cache", *inputs, **other)
    cache = {"keys": keys, "values": values, "position": torch.tensor([7]), "norms": norms}
    routed(OPERATION, *inputs, torch.tensor([8]), **cache, scale=0.2)
    assert (keys == other["keys"])[:, :, 7].float().mean() > 0.99
    assert torch.equal(values, other["values"])


@pytest.mark.parametrize("units", [0, 8], ids=["one split", "several"])
@pytest.mark.parametrize(("position", "length"), [(64, 65), (-1, 0), (70, 30), (20, 30), (29, 31)], ids=str)
def test_nothing_is_written_to_another_row_and_the_result_is_nan(position, length, units, monkeypatch):
    """The new key must be the last one, and inside the cache. Otherwise, no row is written."""
    splits(monkeypatch, units)
    inputs, keys, values, _ = tensors((2, 8, 2, 64, 32, 32), BF16)
    before = keys.clone(), values.clone()
    output = routed(
        OPERATION,
        *inputs,
        torch.tensor([length]),
        keys=keys,
        values=values,
        position=torch.tensor([position]),
        scale=0.2,
    )
    assert output.isnan().all() and torch.equal(keys, before[0]) and torch.equal(values, before[1])


@pytest.mark.parametrize("units", [0, 8], ids=["one split", "several"])
def test_one_wrong_row_of_several_is_not_written_and_the_result_is_nan(units, monkeypatch):
    splits(monkeypatch, units)
    inputs, keys, values, _ = tensors((2, 8, 2, 64, 32, 32), BF16, tokens=4)
    before = keys.clone(), values.clone()
    cache = {"keys": keys, "values": values, "position": torch.tensor([26, 27, 40, 29])}
    output = routed(OPERATION, *inputs, torch.tensor([30]), **cache, scale=0.2)
    assert output.isnan().all()
    untouched = torch.ones(64, dtype=torch.bool).index_fill_(0, torch.tensor([26, 27, 29]), False)
    for cache, original in zip((keys, values), before, strict=True):
        assert torch.equal(cache[:, :, untouched], original[:, :, untouched])


@pytest.mark.parametrize("units", [0, 8], ids=["one split", "several"])
def test_padding_among_several_new_tokens_may_be_nan(units, monkeypatch):
    splits(monkeypatch, units)
    inputs, keys, values, _ = tensors((2, 8, 2, 64, 32, 32), BF16, tokens=4)
    inputs[2][1, :, :2] = torch.nan
    places = torch.arange(26, 30).repeat_interleave(2)[::2]
    cache = {"keys": keys, "values": values, "position": places, "starts": torch.tensor([0, 28], dtype=torch.int32)}
    output = routed(OPERATION, *inputs, torch.tensor([30]), **cache, scale=0.2)
    assert output[1, 2:].isfinite().all() and torch.equal(output[1, :2], torch.zeros_like(output[1, :2]))


def test_lengths_and_positions_are_read_at_run_time():
    """Several steps with one cache, as in a recorded graph, agree with the eager tier."""
    shape = (2, 4, 2, 200, 32, 32)
    _, keys, values, _ = tensors(shape, BF16)
    lengths, position = torch.tensor([130]), torch.tensor([129])
    for _ in range(3):
        inputs, *_ = tensors(shape, BF16)
        other = {"keys": keys.clone(), "values": values.clone(), "position": position}
        expected = eager_tier(OPERATION, *inputs, lengths, **other, scale=0.2)
        output = routed(OPERATION, *inputs, lengths, keys=keys, values=values, position=position, scale=0.2)
        torch.testing.assert_close(output, expected, rtol=2**-6, atol=2**-6)
        lengths += 1
        position += 1


def test_any_strides_are_supported():
    inputs, keys, values, _ = tensors((2, 4, 2, 190, 32, 32), BF16)
    arguments = {"position": torch.tensor([179]), "scale": 0.2}
    expected = routed(OPERATION, *inputs, torch.tensor([180]), keys=keys.clone(), values=values.clone(), **arguments)
    by_position = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (keys, values)]
    part = [torch.cat((tensor, tensor), 2)[:, :, :190] for tensor in (keys, values)]
    for pair in (by_position, part):
        output = routed(OPERATION, *inputs, torch.tensor([180]), keys=pair[0], values=pair[1], **arguments)
        assert torch.equal(output, expected) and torch.equal(pair[0][:, :, 179], by_position[0][:, :, 179])
    strided = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in inputs[:3]]
    output = routed(OPERATION, *strided, *inputs[3:], torch.tensor([180]), keys=keys, values=values, **arguments)
    assert torch.equal(output, expected)


PLAIN = AttendIntoCacheSpec(
    dtype=SERVED[0],
    angle_dtype=SERVED[0],
    device=CPU,
    heads=4,
    kv_heads=2,
    head_dim=16,
    value_dim=16,
    rotated=16,
    shared=True,
    once=False,
    norm_dtype=None,
    one_plus=False,
    softcap=False,
    sinks=False,
    starts=False,
    window=None,
    grad=False,
)
FORMS = {
    "plain": PLAIN,
    "norms": PLAIN._replace(norm_dtype=SERVED[0], starts=True),
    "Gemma": PLAIN._replace(norm_dtype=SERVED[0], one_plus=True, window=5, softcap=True),
    "partial": PLAIN._replace(rotated=8, value_dim=12, shared=False),
    "gpt-oss": PLAIN._replace(once=True, sinks=True, window=5),
    "several tokens": PLAIN._replace(norm_dtype=SERVED[0], one_query=False, starts=True),
    "several tokens, window": PLAIN._replace(once=True, one_query=False, window=5),
}


@pytest.mark.parametrize("name", FORMS)
def test_first_use_checks_pass_and_detect_a_wrong_result(name, monkeypatch):
    kind = tuple(FORMS[name])
    assert probe_cases.check(OPERATION, "triton", KERNEL, kind) is None
    stock = decode.forward
    monkeypatch.setattr(decode, "forward", lambda *inputs: stock(*inputs) + 1)
    assert "wrong by" in probe_cases.check(OPERATION, "triton", KERNEL, kind)
    monkeypatch.setattr(decode, "forward", lambda q, k, *rest: stock(q, k.clone(), *rest))
    assert "wrong by" in probe_cases.check(OPERATION, "triton", KERNEL, kind)
    monkeypatch.setattr(decode, "forward", stock)
    check_more_keys(monkeypatch, OPERATION, KERNEL, FORMS[name])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"angle_dtype": torch.float64}, "angles of torch.float64"),
        ({"grad": True}, "no gradient"),
        ({"rotated": 18}, "within a head"),
        ({"norm_dtype": torch.float64}, "weight of torch.float64"),
        ({"head_dim": 512, "rotated": 512}, "at most 256"),
        ({"one_query": False, "few_queries": False}, "at most 16 queries"),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused(change, word):
    assert word in attend_into_cache.refuses(PLAIN._replace(**change), here())


def test_the_kernel_is_refused_if_the_user_chose_a_tier_for_a_part():
    for tier, spec in (("rope=torch", PLAIN), ("rms_norm=eager", PLAIN._replace(norm_dtype=SERVED[0]))):
        with options.override(tier=tier):
            assert "tier was requested" in _triton_refuses(spec, here())
    required = {**options.current().aiter, "rope": options.Switch.REQUIRED}
    with options.override(aiter=required):
        assert "aiter was required" in _triton_refuses(PLAIN, here())


def test_norms_of_two_kinds_are_refused():
    inputs, keys, values, _ = tensors((1, 2, 2, 4, 8, 8), FP32)
    norms = ops.Norm(torch.ones(8), 1e-6), ops.Norm(torch.ones(8), 1e-6, True)
    cache = {"keys": keys, "values": values, "position": torch.tensor([0]), "norms": norms}
    with pytest.raises(OptionError, match="the same kind"):
        ops.attend_into_cache(*inputs, torch.tensor([1]), **cache, scale=1.0)


def test_it_is_one_op_of_a_compiled_graph():
    inputs, keys, values, _ = tensors((1, 4, 2, 70, 16, 16), SERVED[0])
    arguments = {"position": torch.tensor([65]), "scale": 0.2, "softcap": 2.0}

    def call(query, keys, values):
        keys, values = keys.clone(), values.clone()
        return ops.attend_into_cache(query, *inputs[1:], torch.tensor([66]), keys=keys, values=values, **arguments)

    assert "hf_rocm.triton_attend_into_cache.default" in compiled_once(call, inputs[0], keys, values)
