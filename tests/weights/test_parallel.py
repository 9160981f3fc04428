"""DDP and FSDP2 over a prepared model, one process each: training equals that of an unfused one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_rocm.weights.fuse import fused
from tests.weights import models
from tests.weights.models import GROUPS, IDS, blocks, follows


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, optimized):
    optimizer = torch.optim.AdamW(optimized.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()


@pytest.mark.usefixtures("group")
def test_ddp(model):
    twin = models.unfused()
    train(DistributedDataParallel(model), model)
    train(twin, twin)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    follows(model, GROUPS)


@pytest.mark.usefixtures("group")
def test_fsdp2(model):
    twin = models.unfused()
    mesh = init_device_mesh("cpu", (1,))  # where there is a GPU, it would be taken
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, model)
    train(twin, twin)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, use_cache=False).logits, twin(IDS, use_cache=False).logits)
    assert not any(fused(module) for module in model.modules())
    assert blocks(model) == 0
