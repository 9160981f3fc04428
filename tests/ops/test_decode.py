"""decode_attention in the torch and eager tiers, compared with the reference, and the refusals of the Triton kernel."""

from __future__ import annotations

import sys

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.ops import registry
from hf_rocm.ops.decode import seen_keys
from hf_rocm.ops.mask_patterns import CacheRows, recognise
from hf_rocm.ops.specs.attention import AttentionSpec, DecodeSpec
from hf_rocm.ops.triton import decode, tiles
from tests.ops.test_attention import reference, tensors
from tests.tolerance import assert_as_good_as_eager

# The package's attribute `attention` is the operation, not the module.
MODULE = sys.modules["hf_rocm.ops.attention"]
CPU = torch.device("cpu")
DECODING = DecodeSpec(
    dtype=torch.bfloat16,
    device=CPU,
    heads=8,
    kv_heads=2,
    head_dim=64,
    value_dim=64,
    softcap=False,
    sinks=False,
    grad=False,
)
ATTENTION = AttentionSpec(
    torch.bfloat16, CPU, 8, 2, 64, 64, True, False, False, False, None, False, False, None, False, False
)


def run(tier, *arguments, **keywords):
    with options.override(tiers={"attention": tier}), ops.recording() as routes:
        output = ops.decode_attention(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [("decode_attention", tier)]
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tier", ["torch", "eager"])
@pytest.mark.parametrize("s_q", [1, 3, 17])
@pytest.mark.parametrize("window", [None, 4])
def test_starts_lengths_and_windows(window, s_q, tier, dtype):
    """Every row equals causal attention over its real keys, within the window."""
    query, key, value = tensors((3, 4, 2, s_q, 30, 8, 12), dtype)
    lengths, starts = torch.tensor([30, 20, 17]), torch.tensor([0, 20 - s_q, 0])
    settings = {"scale": 0.3, "starts": starts, "window": window}
    output = run(tier, query, key, value, lengths, **settings)
    rows = []
    for row, (end, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        row_tensors = (tensor[[row]] for tensor in (query, key[:, :, start:end], value[:, :, start:end]))
        rows.append(reference(*row_tensors, scale=0.3, causal=True, window=window))
    eager = run("eager", query, key, value, lengths, **settings)
    assert_as_good_as_eager(output, eager, torch.cat(rows), summed=value)


@pytest.mark.parametrize("tier", ["torch", "eager"])
def test_a_rolling_cache_has_the_last_keys(tier):
    """Every row has 25 keys so far, and the cache contains the last 8. In the second row, three of them are padding."""
    query, key, value = tensors((2, 4, 2, 2, 8, 8, 8), torch.float32)
    settings = {"scale": 0.3, "starts": torch.tensor([3, 20]), "window": 8}
    output = run(tier, query, key, value, torch.tensor([25]), **settings)
    first = reference(query[:1], key[:1], value[:1], scale=0.3, causal=True, window=8)
    second = reference(query[1:], key[1:, :, 3:], value[1:, :, 3:], scale=0.3, causal=True)
    torch.testing.assert_close(output.double(), torch.cat((first, second)), rtol=0, atol=1e-6)


def test_lengths_give_the_same_result_as_the_equivalent_mask():
    """`ops.attention` returns the same result with `CacheRows` as with the equivalent mask."""
    query, key, value = tensors((2, 4, 2, 1, 12, 8, 8), torch.float32)
    lengths, starts = torch.tensor([10]), torch.tensor([0, 7])
    mask = seen_keys(1, 12, lengths, starts, 5)
    with ops.recording() as routes:
        actual, _ = ops.attention(query, key, value, scale=0.3, padded=CacheRows(lengths, starts, window=5))
    assert [route.operation for route in routes] == ["decode_attention"]
    torch.testing.assert_close(actual, ops.attention(query, key, value, scale=0.3, mask=mask)[0])


REFUSALS = [
    (decode.refuses, DECODING, {"few_queries": False, "one_query": False}, "at most 16 queries for each row"),
    (decode.refuses, DECODING, {"grad": True}, "the decode kernel has no gradient"),
    (decode.refuses, DECODING, {"dtype": torch.float64}, "supports fp32, bf16 and fp16, not torch.float64"),
    (decode.refuses, DECODING, {"dtype": torch.float32}, "less accurate than fp32 requires"),
    (decode.refuses, DECODING, {"value_dim": 512}, "head dims must be at most 256, got 64 and 512"),
    (decode.attention_refuses, ATTENTION, {"weights": True}, "doesn't return attention weights"),
    (decode.attention_refuses, ATTENTION, {"one_query": False}, "queries, and several only if there are more keys"),
    (
        decode.attention_refuses,
        ATTENTION,
        {"one_query": False, "square": True},
        "queries, and several only if there are more keys",
    ),
    (decode.attention_refuses, ATTENTION, {"grad": True}, "the decode kernel has no gradient"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[3])
def test_unsupported_calls_are_refused(case, monkeypatch):
    monkeypatch.setattr(decode.detect, "unavailable", lambda device: None)
    refuses, spec, changes, words = case
    assert refuses(spec, Device("cuda", rocm=True, arch="gfx942")) is None
    assert words in refuses(spec._replace(**changes), Device("cuda", rocm=True, arch="gfx942"))


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("gfx1100", {"head_dim": 256, "value_dim": 256}),
        ("gfx1150", {"head_dim": 192}),
        ("gfx1151", {"head_dim": 192}),
        ("gfx1151", {"value_dim": 256, "dtype": torch.float16}),
    ],
)
def test_calls_that_would_spill_registers_are_refused_on_radeon(arch, changes, monkeypatch):
    monkeypatch.setattr(decode.detect, "unavailable", lambda device: None)
    spec = DECODING._replace(**changes)
    assert "would spill registers" in decode.refuses(spec, Device("cuda", rocm=True, arch=arch))
    for other in ("gfx90a", "gfx942", "gfx950"):
        assert decode.refuses(spec, Device("cuda", rocm=True, arch=other)) is None
    assert decode.refuses(DECODING, Device("cuda", rocm=True, arch=arch)) is None


def test_calls_for_which_pytorch_splits_the_keys_are_refused(monkeypatch):
    monkeypatch.setattr(decode.detect, "unavailable", lambda device: None)
    nvidia, amd = Device("cuda", rocm=False), Device("cuda", rocm=True, arch="gfx942")
    assert "PyTorch's kernel also splits the keys" in decode.attention_refuses(ATTENTION, nvidia)
    assert decode.attention_refuses(ATTENTION, amd) is None
    for restricted in ({"mask": torch.bool}, {"window": 8}, {"softcap": True}, {"sinks": True}):
        assert decode.attention_refuses(ATTENTION._replace(**restricted), nvidia) is None
    with options.override(tier="triton"):
        assert decode.attention_refuses(ATTENTION, nvidia) is None
    # PyTorch's attention needs a mask instead of lengths, and with a mask its kernel does not split the keys
    assert decode.refuses(DECODING, nvidia) is None


def test_prefill_is_refused(monkeypatch):
    """The test uses the specifications that `ops.attention` builds."""
    monkeypatch.setattr(decode.detect, "unavailable", lambda device: None)
    accepted, requested = {}, []
    monkeypatch.setattr(
        MODULE._operation, "calls", registry.Table(lambda spec: requested.append(spec) or _implementation)
    )
    for s_q, s_k in ((1, 1), (1, 9), (2, 9), (16, 17), (16, 16), (17, 40), (9, 5)):
        query, key, value = tensors((1, 4, 2, s_q, s_k, 8, 8), torch.bfloat16)
        ops.attention(query, key, value, scale=1.0, causal=True)
        device = Device("cuda", rocm=True, arch="gfx942")
        accepted[s_q, s_k] = decode.attention_refuses(AttentionSpec(*requested[-1]), device) is None
    assert accepted == {
        (1, 1): True,
        (1, 9): True,
        (2, 9): True,
        (16, 17): True,
        (16, 16): False,
        (17, 40): False,
        (9, 5): False,
    }


def _implementation(*_, **__):
    return None, None


@pytest.mark.parametrize("arch", [None, "gfx90a", "gfx942", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [8, 64, 96, 128, 256])
def test_every_plan_fits(dim, size, arch):
    for b, keys, rows in ((1, 1, 1), (1, 1024, 4), (8, 32768, 4), (64, 131072, 128), (256, 100, 16)):
        plan = decode.plan(b, 8, rows, keys, dim, size, 304, arch)
        # tl.dot has a minimum size of 16.
        assert plan.pieces * plan.rows >= rows and plan.rows >= 16 and plan.keys >= 16
        assert 1 <= plan.splits <= tiles.MOST_SPLITS and (plan.splits - 1) * plan.keys < max(1, keys)
        wide = max(16, 1 << (dim - 1).bit_length())
        # LDS must hold a block of keys and a block of values.
        assert 2 * plan.keys * wide * size <= 64 * 1024


def test_the_number_of_splits_depends_on_the_batch_and_the_keys():
    assert decode.plan(1, 8, 4, 65536, 128, 2, 132, None).splits == 16
    assert decode.plan(1, 8, 4, 65536, 128, 2, 304, "gfx942").splits == 76
    assert decode.plan(512, 8, 4, 1024, 128, 2, 132, None).splits == 1
    assert decode.plan(512, 8, 4, 65536, 128, 2, 132, None).splits == 2
    assert decode.plan(1, 8, 4, 40, 128, 2, 132, None).splits == 1
    assert decode.plan(1, 8, 4, 1152, 128, 2, 132, None)[1:4] == (32, 1, 36)
    assert decode.plan(2, 8, 4, 1152, 128, 2, 132, None)[1:4] == (64, 1, 8)


def test_a_mask_that_a_kernel_supports_is_not_read(monkeypatch):
    query, key, value = tensors((2, 4, 2, 1, 9, 16, 16), torch.float32)
    mask = seen_keys(1, 9, torch.tensor([9]), torch.tensor([0, 4]), None)
    monkeypatch.setattr(MODULE, "kernel_serves", lambda *_: True)
    monkeypatch.setattr(registry, "kernel_serves", lambda *_: pytest.fail("a kernel without a mask was looked up"))
    assert recognise(mask, query, key, value) is None
