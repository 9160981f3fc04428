"""The model as the steps of one call find it: its fingerprint, and what is compared before every step."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.hooks import RemovableHandle

from hf_rocm.generation.fingerprint import fingerprint
from hf_rocm.generation.state import State
from hf_rocm.generation.watch import last_watches_of
from hf_rocm.overlay.replacements import Watch


class ModelState(NamedTuple):
    """A model between the prompt and the first step of a call.

    number: the number of its fingerprint. watch: the functions that are compared before every step. forward: the
    forward that is set on the model itself, or None. hooks: how many hooks this process had registered. switches:
    `State.switches`.
    """

    number: int
    model: Any
    watch: Watch
    forward: Any
    hooks: int
    switches: int

    def replaced(self) -> str | None:
        """Return a sentence about a function that has been replaced since, or None."""
        if self.model.__dict__.get("forward") is not self.forward:
            return "a forward was set on the model"
        return None if self.watch.unchanged() else self.watch.difference()


def examine(model: Any, state: State, *, probable: bool) -> ModelState:
    """Fingerprint a model. This takes a few microseconds per module. probable: see `State.number_of`."""
    watches = last_watches_of(model)
    number = state.number_of(fingerprint(model, watches), probable=probable)
    forward = model.__dict__.get("forward")
    return ModelState(number, model, watches.step, forward, RemovableHandle.next_id, state.switches)
