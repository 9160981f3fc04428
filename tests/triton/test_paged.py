"""Paged decode attention in the split kernel, compared with the float64 oracle. Unused rows of pages are NaN."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.ops import probe_cases
from hf_rocm.ops.paged import eager_paged
from hf_rocm.ops.specs.attention import PagedSpec
from hf_rocm.ops.triton import decode
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import check_more_keys, here, random, routed, windows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SERVED = [FP32, BF16, FP16] if suite.gpu() is None else [BF16, FP16]
USUAL = SERVED[0]


@pytest.fixture(autouse=True)
def several_splits(monkeypatch):
    monkeypatch.setattr(decode, "units", lambda device: 8)
    decode._work.cache_clear()


def pages_of(lengths, page, kv_heads, dims, dtype, columns):
    """Returns a page table in random order, and pages filled up to the given lengths. The rest is NaN."""
    rows = len(lengths)
    order = 1 + torch.randperm(rows * columns + 1, generator=torch.Generator().manual_seed(1))
    # Page 0 is an ordinary page.
    order = torch.cat((torch.zeros(1, dtype=order.dtype), order))
    table = order[: rows * columns].view(rows, columns).to(torch.int32)
    pages = [torch.full((len(order), page, kv_heads, dim), torch.nan, dtype=dtype) for dim in dims]
    for row, length in enumerate(lengths):
        for j in range(length):
            for seed, tensor in enumerate(pages):
                tensor[table[row, j // page], j % page] = random(*tensor.shape[2:], dtype=dtype, seed=9 * j + seed)
        # The remaining pages are not allocated.
        table[row, -(-(length + 1) // page) :] = -1
    return table, *pages


def check(lengths, *, page, columns=4, **terms):
    """Compare once, and in machine code also with enough keys for several iterations of a program's loop."""
    check_once(lengths, page=page, columns=columns, **terms)
    if suite.gpu() is not None:
        # 0 units result in one split, and 8 in several.
        for units, more in ((0, 256), (8, 640)):
            longer = [None if length is None else length + more for length in lengths]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decode, "units", lambda device, units=units: units)
                decode._work.cache_clear()
                for wide in windows(terms, more):
                    check_once(longer, page=page, columns=columns + -(-more // page), **wide)
        decode._work.cache_clear()


def check_once(
    lengths, *, page, heads=(4, 2), dims=(32, 32), s_q=1, dtype=USUAL, new=True, columns, full=False, **terms
):
    """Compare the results and the written pages with the oracle.

    lengths: the number of keys of each row, without the queries' own keys; None for a row without a request.
    full: whether the pages also contain keys at the positions of the new keys.
    """
    h, kv_heads = heads
    b = len(lengths)
    total = torch.tensor([0 if length is None else length + s_q for length in lengths], dtype=torch.int32)
    kept = [0 if length is None else length + (0 if new and not full else s_q) for length in lengths]
    # The last query may need one more page.
    if s_q > 1:
        columns += 1
    table, *pages = pages_of(kept, page, kv_heads, dims, dtype, columns)
    for row, length in enumerate(total.tolist()):
        used = -(-length // page)
        missing = table[row, :used] < 0
        table[row, :used][missing] = torch.arange(len(pages[0]) - 2, len(pages[0]), dtype=torch.int32)[: missing.sum()]
    query = random(b, s_q, h, dims[0], dtype=dtype).transpose(1, 2)
    kv = [
        random(b, s_q, kv_heads, dim, dtype=dtype, seed=seed).transpose(1, 2) if new else None
        for seed, dim in enumerate(dims, 5)
    ]
    sinks = random(h, dtype=dtype, seed=3) if terms.pop("sinks", False) else None
    slots = terms.pop("slots", None)
    # A new key replaces another one; the slots are a strided view.
    if slots is not None:
        slots = torch.tensor([slots, [-9] * b], dtype=torch.int32).T.contiguous()[:, 0]
    arguments = {"scale": dims[0] ** -0.5, "window": None, "softcap": None, "slots": slots, **terms}

    def run(function, convert, sink):
        copies = [convert(tensor) if tensor is not None else None for tensor in (query, *pages, *kv)]
        output = function(*copies[:3], table, total, *copies[3:], sinks=sink, **arguments)
        return output, copies[1:3]

    eager, _ = run(eager_paged, torch.Tensor.clone, sinks)
    expected, wide = run(eager_paged, torch.Tensor.double, None if sinks is None else sinks.double())
    output, written = run(lambda *a, **k: routed("paged_attention", *a, **k), torch.Tensor.clone, sinks)
    assert output.is_contiguous()
    assert_as_good_as_eager(output, eager, expected)
    # Only the new rows were written, at their positions.
    for actual, oracle in zip(written, wide, strict=True):
        assert torch.equal(actual.double().nan_to_num(7e3), oracle.nan_to_num(7e3))
    for row, length in enumerate(lengths):
        assert length is not None or (output[row] == 0).all()


@pytest.mark.parametrize("dtype", SERVED, ids=str)
@pytest.mark.parametrize("page", [4, 16, 100])
def test_single_queries(page, dtype):
    check([page - 1, 0, None, 3 * page, 2 * page], page=page, dtype=dtype)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("s_q", [2, 16])
def test_several_queries(s_q, new):
    check([30, 0], page=16, s_q=s_q, new=new)


@pytest.mark.parametrize(
    "terms", [{"softcap": 2.0}, {"sinks": True}, {"window": 20}, {"softcap": 3.0, "sinks": True, "window": 5}], ids=str
)
def test_softcap_windows_and_sinks_are_applied_to_pages(terms):
    check([63, 5, None], page=16, columns=5, **terms)


@pytest.mark.parametrize(("heads", "dims"), [((7, 1), (80, 80)), ((2, 2), (64, 48)), ((40, 1), (16, 16))], ids=str)
def test_every_shape_of_heads_is_supported(heads, dims):
    check([17, 40], page=16, heads=heads, dims=dims)


@pytest.mark.parametrize("terms", [{}, {"softcap": 2.0, "sinks": True}], ids=str)
def test_a_new_key_replaces_an_older_one(terms):
    """In a full ring of a sliding layer, the pages already contain keys at the positions of new keys."""
    lengths = [33, 16, None, 63]
    check(
        [length if length is None else length - 1 for length in lengths],
        page=16,
        slots=[5, 15, 3, 0],
        full=True,
        **terms,
    )


def test_one_program_per_head_has_the_same_results(monkeypatch):
    monkeypatch.setattr(decode, "units", lambda device: 1)
    decode._work.cache_clear()
    check([17, 40, None], page=16, sinks=True)


def test_one_request_uses_its_own_length():
    """In `decode_attention`, a single length applies to all rows. Here, it belongs to the only row."""
    check([33], page=16)


SPEC = PagedSpec(USUAL, torch.device("cpu"), 4, 2, 16, 16, 16, softcap=False, sinks=False)


@pytest.mark.parametrize(
    "spec", [SPEC, SPEC._replace(softcap=True, sinks=True, window=5, new=False), SPEC._replace(slots=True)], ids=str
)
def test_first_use_checks_pass_and_detect_a_missing_key(spec, monkeypatch):
    assert probe_cases.check("paged_attention", "triton", "decode_kernel, pages", tuple(spec)) is None
    stock = decode._traced
    monkeypatch.setattr(decode, "_traced", lambda q, k, v, lengths, *rest: stock(q, k, v, lengths - 1, *rest))
    assert "wrong by" in probe_cases.check("paged_attention", "triton", "decode_kernel, pages", tuple(spec))
    monkeypatch.setattr(decode, "_traced", stock)
    check_more_keys(monkeypatch, "paged_attention", "decode_kernel, pages", spec)


def test_unsupported_calls_are_refused():
    assert "16 queries" in decode.refuses(SPEC._replace(few_queries=False), here())
    assert "at most 256" in decode.refuses(SPEC._replace(head_dim=320), here())
    assert decode.refuses(SPEC, here()) is None
