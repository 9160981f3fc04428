"""Allow reading the random state while a graph is recorded, which raises an error in older releases of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_rocm import patches
from hf_rocm.patches import Change


@contextmanager
def random_state_in_capture() -> Iterator[None]:
    """Within the block, the GPU's random state may be read and restored while a graph is recorded.

        with hf_rocm.random_state_in_capture(), torch.cuda.graph(graph):
            output = step(static_input)

    PyTorch before 2.10 raises an error if a step calls `torch.cuda.get_rng_state`, or if `torch.compile` compiles it
    for the first time inside the recording (Dynamo then reads and restores the state). Within the block, a read that
    PyTorch refuses returns the state at the beginning of the block. After such a read, writes during a recording are
    ignored, because recorded kernels draw from a state that the graph itself advances. Where PyTorch allows the read
    (pytorch#162505), and outside a recording, nothing changes.

    Steps that seed or rewind the generator on purpose, such as activation checkpointing with dropout, are not
    supported. The change applies to all threads until the outermost block ends.
    """
    if not torch.cuda.is_available():
        yield
        return
    read = torch.cuda.get_rng_state
    initial = {index: read(index) for index in range(torch.cuda.device_count())}
    refused = False

    def reading(change: Change) -> Callable[..., torch.Tensor]:
        def get_rng_state(device: Any = "cuda") -> torch.Tensor:
            nonlocal refused
            try:
                state: torch.Tensor = change.original(device)
                return state
            except RuntimeError:
                if not change.live or not torch.cuda.is_current_stream_capturing():
                    raise
                refused = True
                return initial[_index(device)].clone()

        return get_rng_state

    def writing(change: Change) -> Callable[..., None]:
        def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
            if not (change.live and refused and torch.cuda.is_current_stream_capturing()):
                change.original(new_state, device)

        return set_rng_state

    # torch has both functions in two modules
    makers = (("get_rng_state", reading), ("set_rng_state", writing))
    owners: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    with patches.applied(*(Change(module, name, make) for module in owners for name, make in makers)):
        yield


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)
