"""Shuffled weights on a GPU: their memory, and captured graphs that never read a copy.

Stand-ins compute aiter's results in PyTorch, so these tests don't measure speed.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.ops.aiter import detect
from hf_rocm.weights import shuffled_copy
from tests.aiter import recorded
from tests.aiter.machine import pretend
from tests.tolerance import assert_as_good_as_eager

pytestmark = pytest.mark.gpu

# 8 MiB per layer in bf16.
WIDTH, LAYERS = 2048, 12
LAYER = 2 * WIDTH * WIDTH
# The allocator rounds sizes up.
MARGIN = 2 * 2**20
# The allocator reserves this much memory for a tensor of 1 to 10 MiB.
SEGMENT = 20 * 2**20


@pytest.fixture
def machine(monkeypatch):
    release = recorded.release(recorded.RELEASES[-1])
    monkeypatch.setattr(detect, "load", lambda: release)
    pretend(monkeypatch, "gfx942")
    # A first-use check would run in a child process, which has no aiter.
    with options.override(probe=False):
        yield
    # The recorded calls keep their tensors alive.
    recorded.kernels.CALLS.clear()
    shuffled_copy.unwatch()
    options._forget_choices()


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    return nn.Sequential(*layers).requires_grad_(False)


def measured(model, threshold, **arguments):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with options.override(preshuffle_threshold=threshold):
        hf_rocm.prepare(model, force=True, preshuffle="all", **arguments)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]
    return *grown, torch.cuda.max_memory_allocated() - before[0]


def test_shuffling_in_place_needs_no_additional_memory_and_peaks_at_two_layers(machine):
    model = build()
    stock = LAYERS * LAYER
    allocated, reserved, peak = measured(model, 0)
    assert len(model.__dict__["_hf_rocm_report"]["preshuffle"]["shuffled"]) == LAYERS
    assert allocated <= stock * 0.01 and reserved <= SEGMENT + 2 * MARGIN
    assert peak <= 2 * LAYER + MARGIN
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    state = model.state_dict()
    # Saving does not copy the whole model.
    assert torch.cuda.max_memory_allocated() - before <= 2 * LAYER + MARGIN
    assert all(torch.equal(tensor, weight) for tensor, weight in zip(state.values(), build().parameters(), strict=True))


def test_copies_stay_within_the_budget(machine):
    gc.collect()
    # This includes the workspaces of the BLAS libraries.
    before = torch.cuda.memory_allocated()
    model = build()
    budget = 5 * LAYER
    allocated, _, _ = measured(model, 64, budget=budget)
    assert abs(allocated - budget) <= MARGIN
    hf_rocm.restore(model)
    assert torch.cuda.memory_allocated() - before <= LAYERS * LAYER * 1.01 + MARGIN


def test_a_captured_graph_reads_the_original_weights(machine):
    model = build()
    measured(model, 64, budget=1.0)
    x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert model[0].__dict__["_hf_rocm_group"].serves(x, (model[0].weight,)) is not None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), ops.recording() as routes:
            model(x)
        assert [(route.operation, route.tier) for route in routes] == [("shuffled_linear", "aiter")] * LAYERS
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(x)
        for layer in model:
            # A copy would still have the old values when the graph is replayed.
            layer.weight.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        eager, expected = x, x.double()
        for layer in model:
            eager, expected = nn.functional.linear(eager, layer.weight), expected @ layer.weight.double().t()
    assert_as_good_as_eager(output, eager, expected)
    hf_rocm.restore(model)
