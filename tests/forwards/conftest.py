"""Encoders whose forwards are recorded on a CPU, and the stock results of the same calls."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm.forwards.state import known
from hf_rocm.generation import recorder
from tests.forwards.families import make
from tests.generation.emulator import EmulatedRecorder


@pytest.fixture
def recorded_on_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(recorder.factories, "cpu", EmulatedRecorder)


@pytest.fixture
def pair(recorded_on_cpu):
    """(the recorded model, its twin that is never recorded) of a family.
    Both run the same kernels, so their results are equal.
    """

    def build(name="bert", *, graphs=None, **changes):
        stock = make(name, **changes)
        prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=graphs)
        return prepared, hf_rocm.prepare(stock, force=True, graphs=False)

    return build


def call(model, given, *args, **flags):
    with torch.no_grad():
        return model(*args, **given, **flags)


def tensors(output):
    """Every tensor of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def equal(one, other):
    ones, others = tensors(one), tensors(other)
    assert type(one) is type(other) and len(ones) == len(others) and ones
    return all(torch.equal(*both) for both in zip(ones, others, strict=True))


def counted(model):
    """(number of recordings, number of replays) so far."""
    state = known(model)
    return (state.recorded, state.replayed)


def reasons(model):
    return list(known(model).turned_away)
