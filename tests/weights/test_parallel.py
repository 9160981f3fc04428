"""DDP, FSDP2 and tensor parallelism with a prepared model: the results equal those of an unfused model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_rocm.layers.grouped_linear import live as fused
from tests.distributed.launch import free_port
from tests.weights import models
from tests.weights.models import GROUPS, IDS, assert_matches_stock, blocks


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
def test_ddp_training_equals_that_of_an_unfused_model(model):
    twin = models.unfused()
    train(DistributedDataParallel(model), model)
    train(twin, twin)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert_matches_stock(model, GROUPS)


@pytest.mark.usefixtures("group")
def test_fsdp2_training_equals_that_of_an_unfused_model(model):
    twin = models.unfused()
    # The default is a GPU if there is one.
    mesh = init_device_mesh("cpu", (1,))
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


@pytest.mark.slow
def test_two_processes_support_every_kind_of_parallelism(checkpoint):
    port = free_port()
    script = Path(__file__).with_name("two_processes.py")
    # pass this process's import path, which includes an installed hf_rocm and the tests
    import_path = os.pathsep.join([*filter(None, sys.path), str(script.parents[2])])
    start = [sys.executable, "-W", "ignore", "-P"] if sys.version_info >= (3, 11) else [sys.executable, "-W", "ignore"]
    ranks = [
        subprocess.Popen(
            [*start, str(script), str(rank), str(port), str(checkpoint)],
            # hide GPUs: gloo runs on the CPU, and transformers would use a GPU
            env={**os.environ, "PYTHONPATH": import_path, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=300)
            assert rank.returncode == 0, error[-3000:]
            assert out.split() == ["tensor_parallel", "data_parallel", "fully_sharded"]
    finally:
        for rank in ranks:
            rank.kill()
