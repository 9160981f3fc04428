"""The rank of a process, and the ranks with which it loads a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_rocm import options
from hf_rocm.distributed.environment import Place, partners, place, tensor_parallel_size
from hf_rocm.errors import OptionError

FIRST_RANK = Place(0, 4, 0)


@dataclass
class ConfigOf4:
    """`DistributedConfig` as in 4.57 and 5.0."""

    enable_expert_parallel: bool = False


@dataclass
class ConfigOf5:
    """`DistributedConfig` as in newer 5.x releases, which compute its sizes when it is created; here they are given."""

    tp_size: int = 1
    tp_plan: object = None
    fsdp_size: int = 1
    dp_replicate_size: int = 1
    pp_size: int = 1
    enable_expert_parallel: bool = False


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Place(3, 4, 3)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Place(3, 4, 1)),
    ],
)
def test_rank_world_size_and_local_rank_are_read_from_the_environment(environ, expected, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert place() == expected


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"tp_plan": "auto"}, 4),
        ({"tp_plan": "auto", "tp_size": 2}, 2),
        ({"tp_size": 4}, 4),
        ({"distributed_config": ConfigOf4()}, 4),
        ({"distributed_config": ConfigOf5(tp_size=4)}, 4),
        ({"distributed_config": ConfigOf5(tp_size=2, fsdp_size=2)}, 2),
        ({"distributed_config": ConfigOf5(fsdp_size=4)}, 1),
        ({"distributed_config": {"tp_plan": "auto"}}, 4),
        ({"distributed_config": {"tp_plan": "auto", "fsdp_size": 2}}, 2),
        ({"distributed_config": {"tp_size": 2, "fsdp_size": 2}}, 2),
    ],
)
def test_loads_over_several_ranks_wait_for_all_ranks(arguments, size):
    assert partners(FIRST_RANK, arguments) == [0, 1, 2, 3]
    assert tensor_parallel_size(FIRST_RANK, arguments) == size


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tp_plan": None, "device_map": "auto"},
        {"tp_plan": "auto", "tp_size": 1},
        {"distributed_config": ConfigOf5()},
        {"distributed_config": ConfigOf5(tp_plan="auto")},
        {"distributed_config": {"tp_size": 1}},
    ],
)
def test_single_process_loads_wait_for_no_rank(arguments):
    assert partners(FIRST_RANK, arguments) == []
    assert tensor_parallel_size(FIRST_RANK, arguments) == 1 or arguments["distributed_config"].tp_plan


class Mesh:
    """A stand-in for `DeviceMesh` with the attributes that are read."""

    def __init__(self, ranks, names=None, inner=None):
        self.mesh, self.mesh_dim_names, self.inner = torch.tensor(ranks), names, inner
        self.ndim = self.mesh.ndim

    def __getitem__(self, name):
        assert name == "tp"
        return self.inner


def test_partners_are_read_from_a_device_mesh():
    mesh = Mesh([0, 2])
    assert partners(FIRST_RANK, {"device_mesh": mesh, "tp_plan": "auto"}) == [0, 2]
    assert tensor_parallel_size(FIRST_RANK, {"device_mesh": mesh, "tp_plan": "auto"}) == 2
    assert partners(Place(1, 4, 1), {"device_mesh": mesh, "tp_plan": "auto"}) == []
    grid = Mesh([[0, 1], [2, 3]], ("dp", "tp"), Mesh([2, 3]))
    assert partners(Place(3, 4, 1), {"device_mesh": grid, "tp_plan": "auto"}) == [2, 3]


def test_a_process_group_takes_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert place() is None
        real = init_device_mesh("cpu", (1,))
        assert (real.ndim, real.mesh.flatten().tolist(), real.mesh_dim_names) == (1, [0], None)
    finally:
        dist.destroy_process_group()


def test_the_time_limit_is_an_option():
    assert options.parse({}).ranks_timeout == 300
    assert options.parse({"HF_ROCM_RANKS_TIMEOUT": "5"}).ranks_timeout == 5
    with pytest.raises(OptionError, match="HF_ROCM_RANKS_TIMEOUT=soon"):
        options.parse({"HF_ROCM_RANKS_TIMEOUT": "soon"})
