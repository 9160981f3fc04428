"""Tensor parallelism, DDP and FSDP2 over gloo. test_parallel.py runs this script in two processes.

Arguments: the rank, a free port, and the checkpoint. Both ranks have the same batch, so averaged gradients equal those
of one process.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import hf_rocm
from hf_rocm.layers import grouped_linear
from hf_rocm.loading.prepare import REPORT
from hf_rocm.weights.sharded import Shards
from tests.weights.models import GROUPS, assert_matches_stock, blocks, live, logits, unfused
from tests.weights.test_parallel import train


def main(rank: str, port: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")
    try:
        for check in (tensor_parallel, data_parallel, fully_sharded):
            check(checkpoint)
            print(check.__name__, flush=True)
    finally:
        dist.destroy_process_group()


def stock(checkpoint: str):
    return LlamaForCausalLM.from_pretrained(checkpoint).eval()


def prepared(checkpoint: str):
    model = hf_rocm.from_pretrained(checkpoint, force=True).eval()
    assert live(model) == GROUPS
    return model


def tensor_parallel(checkpoint: str) -> None:
    """transformers shards the weights, and this rank's rows are fused. tests/distributed has further tests."""
    expected = logits(stock(checkpoint))
    model = LlamaForCausalLM.from_pretrained(checkpoint, tp_plan="auto").eval()
    assert type(model.model.layers[0].mlp.up_proj.weight.data).__name__ == "DTensor"
    hf_rocm.prepare(model, force=True)
    assert not model.__dict__[REPORT]["skipped"] and live(model) == blocks(model) == 0
    with torch.no_grad():
        assert sum(isinstance(grouped_linear.live(module), Shards) for module in model.modules()) == GROUPS
    torch.testing.assert_close(logits(model), expected)
    torch.testing.assert_close(logits(hf_rocm.restore(model)), expected)


def data_parallel(checkpoint: str) -> None:
    model, twin = prepared(checkpoint), unfused()
    train(DistributedDataParallel(model), model)
    train(twin, twin)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert_matches_stock(model, GROUPS)


def fully_sharded(checkpoint: str) -> None:
    model, twin = prepared(checkpoint), unfused()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, model)
    train(twin, twin)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, msg=name)
    torch.testing.assert_close(logits(model), logits(twin))
    assert live(model) == blocks(model) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
