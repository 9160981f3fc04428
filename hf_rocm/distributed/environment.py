"""This process's rank, the ranks that load a model with it, and the store through which they communicate.

They are read from the variables of torchrun or accelerate, or from torch.distributed. No process group is created
here: transformers creates it while it loads a model, on the same port as hf_rocm's store.
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
# The stores that this process has opened; None for a store of torchrun's agent that did not respond. A store that rank
# 0 serves stays open, because the process group later uses the same server.
_stores: list[Any] = []


@dataclass(frozen=True)
class Place:
    """This process's rank among `world` ranks; local: its rank on this machine."""

    rank: int
    world: int
    local: int


def place() -> Place | None:
    """Return this process's rank; None if it is the only process, or if PyTorch lacks torch.distributed."""
    import torch.distributed as distributed

    variables = options.launcher()
    if not distributed.is_available():
        return None
    if process_group() is not None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world = _number(variables, "RANK", 0), _number(variables, "WORLD_SIZE", 1)
    return Place(rank, world, _number(variables, "LOCAL_RANK", rank)) if world > 1 else None


def process_group() -> Any | None:
    """Return torch.distributed's default process group, or None."""
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def partners(here: Place, arguments: Mapping[str, Any]) -> list[int]:
    """Return the ranks, including this one, that load one model together in `from_pretrained` with these arguments.

    Returns an empty list if this rank loads a model alone; it must not wait for other ranks in that case.
    """
    mesh = arguments.get("device_mesh")
    if mesh is not None:
        if mesh.ndim > 1 and "tp" in (mesh.mesh_dim_names or ()):
            mesh = mesh["tp"]
        ranks = sorted(int(rank) for rank in mesh.mesh.flatten())
        return ranks if here.rank in ranks and len(ranks) > 1 else []
    return list(range(here.world)) if _sharded(arguments) else []


def tensor_parallel_size(here: Place, arguments: Mapping[str, Any]) -> int:
    """Return the number of ranks over which tensor parallelism splits a layer; 1 without tensor parallelism."""
    config, mesh = arguments.get("distributed_config"), arguments.get("device_mesh")
    if mesh is not None and (arguments.get("tp_plan") is not None or config is not None):
        return len(partners(here, arguments)) or 1
    size = arguments.get("tp_size") or setting(config, "tp_size")
    if size is not None:
        return int(size)
    plan = arguments.get("tp_plan") or setting(config, "tp_plan")
    if plan is not None or (config is not None and not hasattr(config, "tp_size") and not isinstance(config, dict)):
        others = prod(setting(config, name) or 1 for name in _SIZES if name != "tp_size")
        return max(1, here.world // others)
    return 1


def setting(config: Any, name: str) -> Any:
    """Return a setting of a `DistributedConfig`, which may be given as a dict."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def store(here: Place, *, timeout: float) -> Any | None:
    """Return the store that all ranks can reach: the process group's, the launcher's, or a new one that rank 0 serves.

    Returns None if there is no address, or if the process group has no store. Waits up to `timeout` seconds for rank 0
    or the launcher's store, then raises `RuntimeError`.
    """
    existing = existing_store(here, timeout=timeout)
    if existing is not None or process_group() is not None:
        return existing
    variables = options.launcher()
    if "MASTER_ADDR" not in variables or "MASTER_PORT" not in variables:
        return None
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent's store did not respond to an earlier load, whose timeout may have been shorter, so try again.
        _stores.clear()
        return existing_store(here, timeout=timeout)
    # multi-tenant, so that the process group can use the same server later
    new_store = _tcp_store(here, variables, timeout, is_master=here.rank == 0, multi_tenant=True)
    _stores.append(new_store)
    return new_store


def process_group_store() -> Any | None:
    """Return the store of the process group, or None."""
    from torch.distributed import distributed_c10d

    if process_group() is not None:
        # MPI's groups have no store.
        with contextlib.suppress(AttributeError, ValueError, RuntimeError):
            return distributed_c10d._get_default_store()
    return None


def existing_store(here: Place, *, timeout: float) -> Any | None:
    """Return an existing store: the process group's, one that is already open, or that of torchrun's agent; else None.

    Raises `RuntimeError` if the agent's store does not respond within `timeout` seconds.
    """
    if process_group() is not None:
        return process_group_store()
    if _stores:
        return _stores[-1]
    variables = options.launcher()
    has_agent = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not has_agent or not {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        return None
    try:
        agent_store = _tcp_store(here, variables, timeout)
    except RuntimeError:
        # Do not wait for it a second time.
        _stores.append(None)
        raise
    _stores.append(agent_store)
    return agent_store


def attempt() -> str:
    """Return the number of restarts of this job as text. torchrun's store outlives the ranks that torchrun restarts."""
    return options.launcher().get("TORCHELASTIC_RESTART_COUNT", "0")


def _tcp_store(here: Place, variables: Mapping[str, str], timeout: float, **role: bool) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=timeout)
    # do not wait for the other ranks: the handshake reports missing ranks, and torch's count of workers is unchanged
    return TCPStore(
        variables["MASTER_ADDR"],
        int(variables["MASTER_PORT"]),
        here.world,
        timeout=limit,
        wait_for_workers=False,
        **role,
    )


def _sharded(arguments: Mapping[str, Any]) -> bool:
    config = arguments.get("distributed_config")
    if config is None:
        return arguments.get("tp_size", 1) not in (None, 1) or (
            arguments.get("tp_plan") is not None and arguments.get("tp_size") is None
        )
    sizes = [setting(config, name) for name in _SIZES]
    if setting(config, "tp_size") is None and setting(config, "tp_plan") is not None:
        return True
    if not any(sizes):
        # In transformers 4.x the config has no sizes, and layers are split over all ranks.
        return setting(config, "enable_expert_parallel") is not None
    return any(size not in (None, 1) for size in sizes)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else default
