"""The state after a failed capture, with a stand-in for a GPU graph."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.generation import recorder


class Shared:
    device, pool = torch.device("cuda", 3), (0, 7)


class Graph:
    """A stand-in for a graph. end: the error that `capture_end` raises, if any."""

    def __init__(self, end=None):
        self.end, self.done = end, []

    def capture_end(self):
        self.done.append("capture_end")
        if self.end is not None:
            raise self.end

    def reset(self):
        self.done.append("reset")


@pytest.fixture
def clean_recorder(monkeypatch):
    monkeypatch.setattr(recorder, "_abandoned", [])
    monkeypatch.setattr(recorder, "_devices", {Shared.device: Shared})
    return recorder


def test_a_capture_interrupted_by_the_step_is_freed(clean_recorder):
    """The graph may contain collectives, whose communicator is only destroyed once the graph is freed."""
    graph = Graph()
    clean_recorder._abandon(graph, Shared)
    assert graph.done == ["capture_end", "reset"]
    assert not clean_recorder._abandoned and clean_recorder._devices == {Shared.device: Shared}


@pytest.mark.parametrize("name", [*recorder._LEAVE, None])
@pytest.mark.parametrize("already_ended", [True, False])
def test_a_broken_capture_keeps_its_graph_and_pool(already_ended, name, clean_recorder, monkeypatch):
    """PyTorch's allocators keep using the graph, and keep all freed memory until allocation to its pool ends."""
    ended = []

    def end_allocation(*arguments):
        ended.append(arguments)
        if already_ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    for entry in recorder._LEAVE:
        monkeypatch.delattr(torch._C, entry, raising=False)
    if name is not None:
        monkeypatch.setattr(torch._C, name, end_allocation, raising=False)
    graph = Graph(RuntimeError("operation failed due to a previous error during capture"))
    clean_recorder._abandon(graph, Shared)
    assert graph.done == ["capture_end"] and ended == ([] if name is None else [(3, Shared.pool)])
    assert clean_recorder._abandoned == [(graph, Shared)] and not clean_recorder._devices
