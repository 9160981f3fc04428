"""A step that reads the random state can be recorded on a GPU."""

from __future__ import annotations

import pytest
import torch

import hf_rocm


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_reads_the_state_can_be_recorded() -> None:
    ones = torch.ones(1024, device="cuda")
    torch.nn.functional.dropout(ones)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with hf_rocm.random_state_in_capture(), torch.cuda.graph(graph):
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        dropped = torch.nn.functional.dropout(ones)
    graph.replay()
    first = dropped.clone()
    graph.replay()
    assert not torch.equal(first, dropped)
