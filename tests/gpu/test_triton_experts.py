"""Routed experts in the Triton kernels on a GPU: every layout at sizes of real models and odd sizes, and in a graph."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from tests.ops.test_moe import LAYOUTS, drawn, eager, reference
from tests.tolerance import assert_as_good_as_eager

pytestmark = pytest.mark.gpu

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZES = [(8, 8, 2048, 768), (5, 4, 2880, 2880), (7, 3, 777, 130)]  # (E, k, H, I)


@pytest.fixture(autouse=True)
def unprobed():
    pytest.importorskip("triton", reason="not run: needs Triton")
    with options.override(probe=False), torch.no_grad():
        yield


def on_gpu(shape, dtype, layout):
    tensors, keywords = drawn(shape, dtype, layout)
    moved = {key: tensor.cuda() if isinstance(tensor, torch.Tensor) else tensor for key, tensor in keywords.items()}
    return [tensor.cuda() for tensor in tensors], moved


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_experts(tokens, sizes, layout, dtype):
    tensors, keywords = on_gpu((tokens, *sizes), dtype, layout)
    with ops.recording() as routes:
        output = ops.experts(*tensors, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [("experts", "triton")]
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))


@pytest.mark.parametrize("layout", ["plain", "gpt_oss"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_replay_uses_the_current_selection(tokens, layout):
    """Nothing is read on the host, so a replay uses the experts that its current ids select."""
    (x, gate_up, down, ids, weights), keywords = on_gpu((tokens, 16, 4, 1024, 512), torch.bfloat16, LAYOUTS[layout])
    ops.experts(x, gate_up, down, ids, weights, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.experts(x, gate_up, down, ids, weights, **keywords)
    before = output.clone()
    ids.copy_(15 - ids)
    x.copy_(x.flip(1))
    graph.replay()
    assert torch.equal(output, ops.experts(x, gate_up, down, ids, weights, **keywords))
    assert not torch.equal(output, before)


def test_the_kernels_are_selected_and_checked_in_a_child_process():
    tensors, _ = on_gpu((2, 8, 2, 256, 128), torch.bfloat16, {})
    with options.override(tiers={"experts": "triton"}, probe=True, refresh=True), ops.recording() as routes:
        assert torch.isfinite(ops.experts(*tensors)).all()
    assert [route.name for route in routes] == ["chosen_experts"]
