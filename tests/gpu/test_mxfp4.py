"""Experts in MXFP4 on a GPU: the kernels at sizes that include gpt-oss-20b's, recorded graphs, and a checkpoint."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

import hf_rocm
from hf_rocm import ops, options
from tests.ops.test_moe_mxfp4 import drawn, eager, reference, unbiased
from tests.tolerance import assert_as_good_as_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(Version(transformers.__version__) < Version("4.55"), reason="not run: gpt-oss needs 4.55"),
]
SIZES = [(5, 4, 2880, 2880), (8, 8, 2048, 768), (7, 3, 544, 96)]  # (E, k, H, I)


@pytest.fixture(autouse=True)
def unprobed():
    pytest.importorskip("triton", reason="not run: needs Triton")
    with options.override(probe=False), torch.no_grad():
        yield


def on_gpu(shape, dtype):
    tensors, keywords = drawn(shape, dtype)
    return [tensor.cuda() for tensor in tensors], keywords


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("tokens", "name"), [(1, "chosen"), (3, "chosen"), (8, "chosen"), (90, "dequantize")])
@pytest.mark.parametrize("biased", [True, False], ids=["gpt-oss", "silu"])
def test_experts_are_as_accurate_as_the_eager_tier(tokens, name, sizes, dtype, biased):
    tensors, keywords = on_gpu((tokens, *sizes), dtype)
    tensors, keywords = (tensors, keywords) if biased else unbiased(tensors)
    with ops.recording() as routes:
        output = ops.mxfp4_experts(*tensors, **keywords)
    (route,) = (route for route in routes if route.operation == "mxfp4_experts")
    assert route.tier == "triton" and route.name.startswith(name)
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_replay_uses_the_current_selection(tokens):
    (x, *stored, ids, weights), keywords = on_gpu((tokens, 16, 4, 1024, 512), torch.bfloat16)
    ops.mxfp4_experts(x, *stored, ids, weights, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.mxfp4_experts(x, *stored, ids, weights, **keywords)
    before = output.clone()
    ids.copy_(15 - ids)
    x.copy_(x.flip(1))
    graph.replay()
    assert torch.equal(output, ops.mxfp4_experts(x, *stored, ids, weights, **keywords))
    assert not torch.equal(output, before)


def test_the_kernel_is_selected_and_checked_in_a_child_process():
    tensors, keywords = on_gpu((2, 8, 2, 256, 128), torch.bfloat16)
    with options.override(tiers={"experts": "triton"}, probe=True, refresh=True), ops.recording() as routes:
        assert torch.isfinite(ops.mxfp4_experts(*tensors, **keywords)).all()
    assert [route.name for route in routes] == ["chosen_experts"]


def test_a_checkpoint_stays_packed_and_its_steps_are_recorded(tmp_path):
    """Weights remain packed, logits are as accurate as stock's, and recorded steps give the same tokens."""
    from tests.weights import mxfp4_checkpoints as mxfp4

    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4}
    stock = mxfp4.write(tmp_path, torch.bfloat16, **sizes, vocab_size=512, head_dim=64).cuda()
    wide = copy.deepcopy(stock).double()
    wide.config._experts_implementation = "eager"
    file_size = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = hf_rocm.from_pretrained(tmp_path, force=True, device_map="cuda", attn_implementation="eager")
    gc.collect()
    # The allocator rounds sizes up.
    assert abs(torch.cuda.memory_allocated() - before - file_size) < 0.03 * file_size + 2**20
    ids = torch.arange(3, 35, device="cuda").view(2, 16)
    for inputs in (ids, ids[:, :1]):
        assert_as_good_as_eager(model(inputs).logits, stock(inputs).logits, wide(inputs).logits)
    tokens = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    recorded = model.generate(ids, **tokens)
    hf_rocm.prepare(model, force=True, graphs=False)
    assert torch.equal(recorded, model.generate(ids, **tokens))
