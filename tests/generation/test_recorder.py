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
def kept(monkeypatch):
    monkeypatch.setattr(recorder, "_abandoned", [])
    monkeypatch.setattr(recorder, "_devices", {Shared.device: Shared})
    return recorder


def test_a_capture_interrupted_by_the_step_is_freed(kept):
    """The graph may contain collectives, whose communicator is only destroyed once the graph is freed."""
    graph = Graph()
    kept._abandon(graph, Shared)
    assert graph.done == ["capture_end", "reset"]
    assert not kept._abandoned and kept._devices == {Shared.device: Shared}


@pytest.mark.parametrize("name", [*recorder._LEAVE, None])
@pytest.mark.parametrize("done_already", [True, False])
def test_a_broken_capture_keeps_its_graph_and_pool(done_already, name, kept, monkeypatch):
    """PyTorch's allocators keep using the graph, and keep all freed memory until allocation to its pool ends."""
    left = []

    def leave(*where):
        left.append(where)
        if done_already:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    for entry in recorder._LEAVE:
        monkeypatch.delattr(torch._C, entry, raising=False)
    if name is not None:
        monkeypatch.setattr(torch._C, name, leave, raising=False)
    graph = Graph(RuntimeError("operation failed due to a previous error during capture"))
    kept._abandon(graph, Shared)
    assert graph.done == ["capture_end"] and left == ([] if name is None else [(3, Shared.pool)])
    assert kept._abandoned == [(graph, Shared)] and not kept._devices
