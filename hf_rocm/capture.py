"""Reading the random state while a graph is being recorded, which older PyTorch refuses, made harmless for a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def random_state_in_capture() -> Iterator[None]:
    """Within the block, the GPU's random state may be read and put back while a graph is recorded.

        with hf_rocm.random_state_in_capture(), torch.cuda.graph(graph):
            output = step(static_input)

    For PyTorch before 2.10, and for code whose step calls `torch.cuda.get_rng_state`, or is wrapped in `torch.compile`
    and compiles for the first time inside the recording (Dynamo reads and restores the state then): both raise there.
    Where PyTorch refuses a read, it gives the state as it was when the block was entered, and writes that follow in
    the recording are left out: what is recorded draws from the generator that the graph advances by itself. Where
    PyTorch answers (pytorch#162505), and outside of a recording, nothing changes.

    What it can't make right: a step that seeds or rewinds the generator on purpose, such as a checkpoint with dropout.
    It holds for all threads while the block is open, nests, and is gone when the last block ends.
    """
    if not torch.cuda.is_available():
        yield
        return
    read, write = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    entered = {index: read(index) for index in range(torch.cuda.device_count())}
    refused = False

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        nonlocal refused
        try:
            return read(device)
        except RuntimeError:
            if not torch.cuda.is_current_stream_capturing():
                raise
            refused = True
            return entered[_index(device)].clone()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        if not (refused and torch.cuda.is_current_stream_capturing()):
            write(new_state, device)

    with _replaced(get_rng_state, set_rng_state):
        yield


@contextmanager
def _replaced(read: Callable[..., Any], write: Callable[..., Any]) -> Iterator[None]:
    """Put both functions in the two places that torch keeps them in."""
    before = [(module, module.get_rng_state, module.set_rng_state) for module in (torch.cuda, torch.cuda.random)]
    try:
        for module, _, _ in before:
            module.get_rng_state, module.set_rng_state = read, write  # type: ignore[attr-defined]
        yield
    finally:
        for module, old_read, old_write in before:
            module.get_rng_state, module.set_rng_state = old_read, old_write  # type: ignore[attr-defined]


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)
