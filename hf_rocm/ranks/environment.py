"""Who am I among the ranks, who loads with me, and through which store can we speak?

Read off what torchrun, accelerate or torch.distributed already know. Nothing is initialised here: transformers makes
the process group itself while it loads, on the very port that our store is on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

from hf_rocm import options

_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size")
_stores: list[Any] = []  # ours; on rank 0 it holds the port that the process group is made on later


@dataclass(frozen=True)
class Place:
    """This process among `world` ranks; local: its number on this machine."""

    rank: int
    world: int
    local: int


def place() -> Place | None:
    """Where this process stands; None if it is the only one, or nobody said."""
    import torch.distributed as distributed

    said = options.launcher()
    if not distributed.is_available():
        return None
    if process_group() is not None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world = _number(said, "RANK", 0), _number(said, "WORLD_SIZE", 1)
    return Place(rank, world, _number(said, "LOCAL_RANK", rank)) if world > 1 else None


def process_group() -> Any | None:
    """torch.distributed's default process group, if there is one."""
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def partners(here: Place, arguments: Mapping[str, Any]) -> list[int]:
    """The ranks that these arguments of `from_pretrained` make load one model together, this one included.

    Empty where each rank loads a model of its own: then nobody may be waited for.
    """
    mesh = arguments.get("device_mesh")
    if mesh is not None:
        if mesh.ndim > 1 and "tp" in (mesh.mesh_dim_names or ()):
            mesh = mesh["tp"]
        ranks = sorted(int(rank) for rank in mesh.mesh.flatten())
        return ranks if here.rank in ranks and len(ranks) > 1 else []
    return list(range(here.world)) if _sharded(arguments) else []


def tensor_parallel_size(here: Place, arguments: Mapping[str, Any]) -> int:
    """Over how many ranks tensor parallelism divides each layer; 1 if it divides none."""
    config, mesh = arguments.get("distributed_config"), arguments.get("device_mesh")
    if mesh is not None and (arguments.get("tp_plan") is not None or config is not None):
        return len(partners(here, arguments)) or 1
    size = arguments.get("tp_size") or of(config, "tp_size")
    if size is not None:
        return int(size)
    plan = arguments.get("tp_plan") or of(config, "tp_plan")
    if plan is not None or (config is not None and not hasattr(config, "tp_size") and not isinstance(config, dict)):
        others = prod(of(config, name) or 1 for name in _SIZES if name != "tp_size")
        return max(1, here.world // others)
    return 1


def of(config: Any, name: str) -> Any:
    """A setting of a `DistributedConfig`, or of the dict that stands for one."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def store(here: Place, *, timeout: float) -> Any | None:
    """The store that all ranks reach: the process group's, the launcher's, or one that rank 0 serves from here on.

    None if nobody said where. Waits for rank 0 up to `timeout` seconds, then raises `RuntimeError`.
    """
    found = existing_store(here, timeout=timeout)
    if found is not None or process_group() is not None:
        return found
    said = options.launcher()
    if "MASTER_ADDR" not in said or "MASTER_PORT" not in said:
        return None
    if said.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _stores.clear()  # it did not answer in an earlier load, which had less patience
        return existing_store(here, timeout=timeout)
    # with several tenants the process group's server is then this one
    made = _tcp_store(here, said, timeout, is_master=here.rank == 0, multi_tenant=True)
    _stores.append(made)
    return made


def groups_store() -> Any | None:
    """The store of the process group, if there is one."""
    from torch.distributed import distributed_c10d

    if process_group() is not None:
        with contextlib.suppress(AttributeError, ValueError, RuntimeError):  # MPI's groups have none
            return distributed_c10d._get_default_store()
    return None


def existing_store(here: Place, *, timeout: float) -> Any | None:
    """A store that is there without us: the process group's, or the one that torchrun's agent serves. Else None.

    Raises `RuntimeError` if the agent's can't be reached within `timeout` seconds.
    """
    if process_group() is not None:
        return groups_store()
    if _stores:
        return _stores[-1]
    said = options.launcher()
    if said.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not {"MASTER_ADDR", "MASTER_PORT"} <= said.keys():
        return None
    try:
        found = _tcp_store(here, said, timeout)
    except RuntimeError:
        _stores.append(None)  # it is not waited for a second time
        raise
    _stores.append(found)
    return found


def attempt() -> str:
    """Which start of the job this is: torchrun's store outlives the ranks that it starts again."""
    return options.launcher().get("TORCHELASTIC_RESTART_COUNT", "0")


def _tcp_store(here: Place, said: Mapping[str, str], timeout: float, **role: bool) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=timeout)
    # it doesn't wait for the others: who has not come is told by name, and the count stays as torch left it
    return TCPStore(
        said["MASTER_ADDR"], int(said["MASTER_PORT"]), here.world, timeout=limit, wait_for_workers=False, **role
    )


def _sharded(arguments: Mapping[str, Any]) -> bool:
    config = arguments.get("distributed_config")
    if config is None:
        return arguments.get("tp_size", 1) not in (None, 1) or (
            arguments.get("tp_plan") is not None and arguments.get("tp_size") is None
        )
    sizes = [of(config, name) for name in _SIZES]
    if of(config, "tp_size") is None and of(config, "tp_plan") is not None:
        return True
    if not any(sizes):  # 4.x: it has none, and divides over all ranks
        return of(config, "enable_expert_parallel") is not None
    return any(size not in (None, 1) for size in sizes)


def _number(said: Mapping[str, str], name: str, default: int) -> int:
    text = said.get(name, "")
    return int(text) if text.isdecimal() else default
