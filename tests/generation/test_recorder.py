"""What a capture that broke off leaves behind, with a graph that stands in for a GPU's."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.generation import recorder


class Shared:
    device, pool = torch.device("cuda", 3), (0, 7)


class Graph:
    """end: what `capture_end` raises, if it does."""

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


def test_a_capture_that_the_step_broke_off_is_not_kept(kept):
    """Its graph may hold collectives, which a communicator would wait for."""
    graph = Graph()
    kept._abandon(graph, Shared)
    assert graph.done == ["capture_end", "reset"]
    assert not kept._abandoned and kept._devices == {Shared.device: Shared}


@pytest.mark.parametrize("name", [*recorder._LEAVE, None])
@pytest.mark.parametrize("done_already", [True, False])
def test_a_broken_capture_leaves_its_pool_and_is_kept_with_it(done_already, name, kept, monkeypatch):
    """Else the allocator would give no memory back until the process ends."""
    left = []

    def leave(*where):
        left.append(where)
        if done_already:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    for each in recorder._LEAVE:
        monkeypatch.delattr(torch._C, each, raising=False)
    if name is not None:
        monkeypatch.setattr(torch._C, name, leave, raising=False)
    graph = Graph(RuntimeError("operation failed due to a previous error during capture"))
    kept._abandon(graph, Shared)
    assert graph.done == ["capture_end"] and left == ([] if name is None else [(3, Shared.pool)])
    assert kept._abandoned == [(graph, Shared)] and not kept._devices
