"""Encoders whose forwards are recorded on a CPU, and comparisons of their outputs."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm import options
from hf_rocm.forwards.state import known
from hf_rocm.generation import recorder
from tests.forwards.families import make
from tests.generation import faults
from tests.generation.conftest import generate
from tests.generation.conftest import make as make_decoder
from tests.generation.emulator import EmulatedRecorder


@pytest.fixture
def recorded_on_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(recorder.factories, "cpu", EmulatedRecorder)


@pytest.fixture
def exact_lengths():
    """Record calls by their exact shapes, so that their results are bitwise equal to the twin's."""
    with options.override(pad_tokens=0):
        yield


def with_twin(stock, graphs=None):
    """Return a prepared model, and one that runs the same kernels and is never recorded. Prepares `stock` itself, too.

    graphs: the argument of `prepare` for the first one.
    """
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=graphs)
    return prepared, hf_rocm.prepare(stock, force=True, graphs=False)


@pytest.fixture
def pair(recorded_on_cpu):
    """A function that returns (a recorded model, its twin, which is never recorded) for a model family.

    Both run the same kernels, so their results are equal if the calls are not padded (`exact_lengths`).
    """

    def build(name="bert", *, graphs=None, **changes):
        # `changes` may contain `task`, another class of the family.
        return with_twin(make(name, **changes), graphs=graphs)

    return build


@pytest.fixture
def decoders(recorded_on_cpu):
    """A function that returns a model whose prompts are recorded, and one that runs the same kernels uncaptured."""

    def build(kind="llama", **changes):
        return with_twin(make_decoder(kind, **changes))

    return build


def logits_of(model, inputs):
    """The logits of the prompt. Later steps run other kernels if they are recorded."""
    return generate(model, inputs, new=3, return_dict_in_generate=True, output_logits=True).logits[0]


def call(model, arguments, *args, **flags):
    with torch.no_grad():
        return model(*args, **arguments, **flags)


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


def close(one, other):
    """Whether two fp32 outputs are equal except for rounding, which differs between kernels."""
    ones, others = tensors(one), tensors(other)
    assert type(one) is type(other) and len(ones) == len(others) and ones
    return all(
        a.shape == b.shape and a.dtype is b.dtype and torch.allclose(a, b, rtol=2e-5, atol=2e-5)
        for a, b in zip(ones, others, strict=True)
    )


def counted(model):
    """(number of recordings, number of replays) so far."""
    state = known(model)
    return (state.recorded, state.replayed)


def reasons(model):
    return list(known(model).turned_away)


def recorder_with(fault, *, first):
    """Return a recorder class. Its replays have this fault in a linear layer, starting with replay number `first`."""

    def of_linear(kept, memory):
        return fault([(_named(operator), *rest) for operator, *rest in kept], memory)

    return faults.recorder_with(of_linear, first=first)


def _named(operator):
    """Give the operator of a linear layer the name `aten.mm`, which the faults expect."""
    if str(operator) not in ("aten.addmm.default", "aten.linear.default"):
        return operator

    def matmul(*args, **kwargs):
        return operator(*args, **kwargs)

    return _Named(matmul)


class _Named:
    def __init__(self, function):
        self._function = function

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)

    def __str__(self):
        return "aten.mm"
