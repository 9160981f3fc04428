"""The end of a decode step in the Triton kernels, compared with PyTorch: argmax, sums of bits and appended tokens."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.ops.append_tokens import one_kernel, stock
from hf_rocm.ops.bits import sum_of_bits
from hf_rocm.ops.specs.step import AppendTokensCall
from hf_rocm.ops.triton import step
from tests.triton.routed import random, routed

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
BEFORE = (3, -1, 2**62, -(2**63), 5)


def finished(logits, extra=None, run=routed):
    """Returns (copy, tokens, digests, doubt, probability)."""
    device = logits.device
    out, tokens = torch.full_like(logits, 7), torch.full(logits.shape[:2], -1, device=device)
    digests, doubt = torch.tensor(BEFORE, device=device), torch.zeros((), dtype=torch.float32, device=device)
    probability = torch.full((1,), -1.0, dtype=torch.float32, device=device)
    run("finish_step", logits, out, tokens, digests, doubt, extra, probability)
    return out, tokens, digests, doubt, probability


def check(logits, extra=None):
    out, tokens, digests, doubt, probability = finished(logits, extra)
    assert torch.equal(out.view(torch.uint8), logits.view(torch.uint8))
    assert torch.equal(tokens, logits.argmax(-1))
    digest = sum_of_bits([logits, tokens, *([] if extra is None else [extra])])
    assert digests.tolist() == [*BEFORE[1:], int(digest)]
    assert bool(doubt == 0) == bool(logits.isfinite().all())
    expected = logits[-1, -1].double().softmax(-1)[tokens[-1, -1]].cpu()
    assert probability.double().cpu() == pytest.approx(float(expected), rel=1e-5, nan_ok=True)
    without = [torch.empty_like(logits), torch.zeros_like(tokens), torch.tensor(BEFORE, device=logits.device)]
    routed("finish_step", logits, *without, torch.zeros_like(doubt), extra)
    assert torch.equal(without[1], tokens) and torch.equal(without[2], digests)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 1, 1024), (3, 1, 63), (1, 6, 3001), (2, 3, 5000)], ids=str)
def test_finish_step(shape, dtype):
    logits = random(*shape, dtype=dtype)
    check(logits)
    check(logits, extra=torch.tensor([2**61 + 3]))
    # Every logit is less than the 0 that masked lanes load.
    check(-logits.abs() - 1)


@every_dtype
def test_the_first_of_equal_logits_is_chosen(dtype):
    logits = random(4, 1, 3000, dtype=dtype).clamp(max=2)
    for places in ((2999, 0), (1023, 1024), (700, 2900), (5, 1025)):
        equal = logits.clone()
        equal[..., list(places)] = 3
        check(equal)
    check(torch.zeros(2, 1, 2100, dtype=dtype))
    zeros = torch.full((1, 1, 2100), -1.0, dtype=dtype)
    zeros[..., 40], zeros[..., 41] = -0.0, 0.0
    check(zeros)


@every_dtype
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_logits_that_are_not_finite_set_doubt(value, dtype):
    for place in (0, 1023, 1024, 2099):
        logits = random(2, 1, 2100, dtype=dtype)
        logits[1, 0, place] = value
        check(logits)
    logits[1, 0, 7], logits[1, 0, 2000], logits[1, 0, 2050] = float("inf"), float("nan"), float("nan")
    check(logits)
    assert finished(logits)[1][1, 0] == 2000


def test_doubt_stays_set():
    logits, doubt = random(1, 1, 64, dtype=torch.bfloat16), torch.tensor(float("nan"))
    arguments = torch.empty_like(logits), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    routed("finish_step", logits, *arguments, doubt)
    assert doubt.isnan()


def test_the_probability_does_not_depend_on_the_default_dtype():
    logits = 4 * random(1, 1, 3000, dtype=torch.float32)
    expected = finished(logits)[4]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(finished(logits)[4], expected) and expected.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("count", "dim"), [(1, 128256), (1, 32000), (8, 151936), (33, 1000), (256, 262144), (1, 7)])
def test_rows_are_divided_into_few_programs(count, dim):
    pieces = step.parts(count, dim)
    assert pieces & (pieces - 1) == 0 and 1 <= pieces <= 128 and pieces * count <= 2 * step.PROGRAMS


@pytest.mark.parametrize(
    ("logits", "word"),
    [
        (torch.ones(1, 1, 8, requires_grad=True), "gradient"),
        (torch.ones(1, 8, 4).transpose(1, 2)[:, :1], "contiguous"),
        (torch.ones(257, 1, 8), "at most 256"),
    ],
    ids=["grad", "strided", "rows"],
)
def test_unsupported_steps_use_pytorch(logits, word):
    from hf_rocm.device import describe
    from hf_rocm.ops.finish_step import _specification
    from hf_rocm.ops.specs.step import FinishStepCall, FinishStepSpec

    out, tokens = logits.detach().clone(), torch.zeros(logits.shape[:2], dtype=torch.int64)
    digests, doubt = torch.zeros(5, dtype=torch.int64), torch.zeros(())
    words = logits.detach().view(torch.int32)
    spec = FinishStepSpec(*_specification(FinishStepCall(logits, words, out, tokens, digests, doubt, None, None)))
    assert word in step.refuses(spec, describe(logits.device))
    ops.finish_step(logits.detach(), out, tokens, digests, doubt)
    assert torch.equal(tokens, logits.argmax(-1))


def appended(ids, tokens, unfinished, ends=None, pad=None, step_ids=None):
    return routed("append_tokens", ids, tokens, unfinished, ends, pad, step_ids)


@pytest.mark.parametrize("length", [1, 7, 1023, 1024, 2500])
@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("ends", [(), (4,), (4, 61, 7)], ids=str)
@pytest.mark.parametrize("pad", [None, 4, 2**40], ids=str)
def test_append_tokens(length, rows, ends, pad):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2**50, (rows, length), generator=generator)
    tokens = torch.tensor([61, 5, 4, 7, 8])[torch.arange(rows) % 5]
    end_tokens = torch.tensor(ends) if ends else None
    padding = None if pad is None else torch.tensor(pad)
    for unfinished in (torch.arange(rows) % 4 != 2, torch.ones(rows), torch.zeros(rows), torch.arange(rows) < 1):
        arguments = ids, tokens, unfinished.long(), end_tokens, padding
        step_ids = torch.zeros((rows, 1), dtype=torch.int64)
        result, expected = appended(*arguments, step_ids), stock(AppendTokensCall(*arguments))
        for actual, wanted in zip(result, expected, strict=True):
            assert torch.equal(actual, wanted) and actual.dtype == wanted.dtype
        assert torch.equal(step_ids, result[0][:, -1:])
        assert all(map(torch.equal, appended(*arguments), expected))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((torch.ones(2, 8, dtype=torch.int64).t(), *[torch.ones(8, dtype=torch.int64)] * 2), "contiguous"),
        ((torch.ones(2, 8, dtype=torch.int32), *[torch.ones(2, dtype=torch.int64)] * 2), "int64"),
        ((torch.ones(257, 1, dtype=torch.int64), *[torch.ones(257, dtype=torch.int64)] * 2), "at most 256"),
        ((torch.ones(1, 1).long(), torch.ones(1).long(), torch.ones(1).long(), torch.arange(17)), "EOS tokens"),
    ],
    ids=["strided", "int32", "rows", "ends"],
)
def test_tokens_that_the_kernel_cannot_append(arguments, word):
    from hf_rocm.errors import TierUnavailable

    with pytest.raises(TierUnavailable, match=word):
        appended(*arguments)
    assert not one_kernel(*arguments)
