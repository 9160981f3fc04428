"""The start of a decode step in the Triton kernels, compared with PyTorch.

The kernel computes positions, masks, rows of the cache and token ids.
"""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.ops.begin_step import stock as begun_by_torch
from hf_rocm.ops.specs.step import BeginStepCall
from hf_rocm.ops.triton import step
from tests.triton.routed import routed

# The value of the kernels' int64 outputs before a step.
UNSET = -7


def step_call(
    *,
    batch=1,
    tokens=1,
    sizes=(64,),
    windows=(None,),
    dtype=torch.uint8,
    starts=False,
    position=5,
    bases=(0,),
    sources=0,
    header=False,
):
    """Returns a call that begins a step at this position, with one mask for each of these sizes."""
    offsets = torch.arange(tokens)
    relative = torch.stack([offsets, *[offsets + 1 - base for base in bases], *[offsets - 3] * batch])
    masks = [torch.full((batch, 1, tokens, size), 7).to(dtype) for size in sizes]
    first = [(torch.arange(batch) * 2 - base).clamp(min=0) if starts else None for base in bases]
    places = [torch.full((21,), UNSET) for _ in sizes]
    ids = torch.arange(batch * 30).view(batch, 30) if sources else None
    extra = 1000 + torch.arange(batch * (tokens + 2)).view(batch, -1) if sources > 1 else None
    return BeginStepCall(
        torch.full_like(relative, UNSET),
        relative,
        *[*masks, None, None][:2],
        *[*first[: len(sizes)], None, None][:2],
        *[*places, None, None][:2],
        torch.full((batch, tokens), UNSET) if sources else None,
        ids,
        extra,
        torch.tensor([2, 1]) if header else None,
        position - 2 * header,
        *[*windows, None, None][:2],
        None if dtype == torch.uint8 else torch.finfo(dtype).min,
        any(position + tokens - base > size for size, base in zip(sizes, bases, strict=False)),
        position - bases[0] - 2 * header,
        position - bases[-1] - 2 * header,
        (30 + tokens - 1 if sources > 1 else 29) - 2 * header,
        (28 if sources > 1 else 30 - tokens) - header,
    )


def check_start(run=routed, device="cpu", **terms):
    calls = [step_call(**terms), step_call(**terms)]
    calls = [
        BeginStepCall(*[one.to(device) if isinstance(one, torch.Tensor) else one for one in call]) for call in calls
    ]
    begun_by_torch(calls[0])
    run("begin_step", calls[1])
    for name, expected, actual in zip(BeginStepCall._fields, *calls, strict=True):
        assert torch.equal(expected, actual) if isinstance(expected, torch.Tensor) else expected == actual, name
    return calls[1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"sizes": (1025,), "position": 1023},
        {"batch": 3, "sizes": (2050,), "position": 7, "starts": True, "sources": 1},
        {"tokens": 6, "sizes": (1024, 48), "windows": (None, 11), "bases": (0, 3), "position": 37, "sources": 2},
        {"tokens": 6, "sizes": (63,), "windows": (4,), "position": 40, "starts": True, "sources": 1},
        {"batch": 2, "sizes": (48, 33), "windows": (None, 9), "bases": (0, 7), "position": 30, "starts": True},
        {"batch": 2, "sizes": (20,), "position": 35, "starts": True},  # a rolling buffer
        {"batch": 5, "sizes": (), "windows": (), "tokens": 2, "sources": 2},
        {"tokens": 6, "sizes": (64, 48), "windows": (None, 11), "bases": (0, 3), "sources": 2, "header": True},
    ],
    ids=["one", "two blocks", "padded", "drafts", "drafts, window", "two kinds", "rolling", "no mask", "header"],
)
def test_begin_step(terms, dtype):
    call = check_start(dtype=dtype, **terms)
    offset = 0 if call.header is None else 2
    assert (call.clock[0] == call.position + offset + torch.arange(call.clock.shape[1])).all()
    for name, value in call._asdict().items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
            assert (value != UNSET).all(), name


@pytest.mark.parametrize("sources", [1, 2])
def test_missing_drafts_are_zeros(sources):
    calls = [step_call(tokens=6, sources=sources)._replace(drafts=28 + 8 * (sources - 1)) for _ in range(2)]
    begun_by_torch(calls[0])
    routed("begin_step", calls[1])
    assert torch.equal(calls[0].input_ids, calls[1].input_ids) and calls[1].input_ids[0, -3:].tolist() == [0, 0, 0]


def test_drafts_come_from_both_sources():
    call = check_start(tokens=6, sources=2)
    assert call.input_ids.tolist() == [[1005, 28, 29, 1000, 1001, 1002]]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mask": torch.ones(1, 1, 1, 64, dtype=torch.float64)}, "float64"),
        ({"mask": torch.ones(1, 1, 1, 128, dtype=torch.uint8)[..., ::2]}, "contiguous"),
        ({"mask_2": torch.ones(1, 1, 1, 64)}, "one dtype"),
        ({"clock": torch.zeros(5000, 1).long(), "relative": torch.zeros(5000, 1).long()}, "at most 4096"),
    ],
    ids=["float64", "strided", "dtypes", "clocks"],
)
def test_starts_that_the_kernel_does_not_support(change, word):
    from hf_rocm.device import describe
    from hf_rocm.ops.begin_step import _specification
    from hf_rocm.ops.specs.step import BeginStepSpec

    call = step_call()._replace(**change)
    assert word in step.begin_refuses(BeginStepSpec(*_specification(call)), describe(call.clock.device))
    ops.begin_step(call)
    assert (call.clock == call.relative + call.position).all()
