"""Random calls of all families with varying shapes, lengths, masks, flags and weights. Outputs are compared later."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm.forwards.state import known
from tests.forwards.conftest import close, counted, equal, reasons, tensors
from tests.forwards.families import FAMILIES, random_call, random_kind

CALLS = 40


def written(model):
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.25)


def moved(model):
    parameter = list(model.parameters())[-1]
    parameter.data = parameter.data * 0.5


def replaced(model):
    linear = next(module for module in model.modules() if type(module) is torch.nn.Linear)
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 0.75)


class Observed(TorchDispatchMode):
    """PyTorch computes some operators by other kernels where a mode observes them, and rounds differently there."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


CHANGES = {9: written, 18: moved, 30: replaced}


def of_two_kinds(name, draw):
    kinds = [random_kind(name, draw) for _ in range(2)]
    return lambda: random_call(name, draw.choice(kinds), draw)


def of_mixed_lengths(name, draw):
    kind = random_kind(name, draw)
    return lambda: random_call(name, {**kind, "length": draw.randrange(4, 62)}, draw)


@pytest.mark.usefixtures("exact_lengths")
@pytest.mark.parametrize("name", FAMILIES)
def test_random_calls_equal_stock(name, pair):
    run(*pair(name), of_two_kinds(name, draw := random.Random(name)), draw, equal)


@pytest.mark.parametrize("name", [name for name, (*_, image) in FAMILIES.items() if not image and name != "clip-text"])
def test_random_lengths_equal_stock(name, pair):
    prepared, stock = pair(name)
    run(prepared, stock, of_mixed_lengths(name, draw := random.Random(name)), draw, close)
    assert set(known(prepared).padded) == {32, 64}


def run(prepared, stock, next_call, draw, same):
    """Random calls of both models, with changes of their weights between them."""
    kept = []
    for number in range(CALLS):
        args, given = next_call()
        before = copy.deepcopy((args, given))
        if number in CHANGES:
            for model in (prepared, stock):
                CHANGES[number](model)
        mode = torch.inference_mode if draw.random() < 0.1 else torch.no_grad
        with mode():
            result, expected = prepared(*args, **given), stock(*args, **given)
            if not same(result, expected):  # a call that is observed before it is recorded, in inference mode
                with Observed():
                    expected = stock(*args, **given)
        assert same(result, expected), f"call {number}"
        assert equal(list(args), list(before[0])) if args else equal(given, before[1])
        kept.append((result, [tensor.clone() for tensor in tensors(result)]))
    for result, values in kept:  # later calls must not have changed them
        assert all(torch.equal(*both) for both in zip(tensors(result), values, strict=True))
    recorded, replayed = counted(prepared)
    assert recorded > 1 and replayed > 2, (recorded, replayed, reasons(prepared))
