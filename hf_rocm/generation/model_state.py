"""The model as the steps of one call find it: its fingerprint, and what is compared before every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hf_rocm.generation.decide import refuses_tools
from hf_rocm.generation.fingerprint import Fingerprint, Writes, fingerprint
from hf_rocm.generation.methods import set_by_others
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.state import State
from hf_rocm.generation.user_cache import observers
from hf_rocm.generation.watch import last_watches_of
from hf_rocm.overlay.replacements import Watch

# The methods that the sampling loop calls between the prompt and the first step.
_BETWEEN = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_has_unfinished_sequences",
    "_optimize_model_for_decode",
)


class ModelState(NamedTuple):
    """A model between the prompt and the first step of a call.

    watch: the functions that are compared before every step. forward: the forward that is set on the model itself, or
    None. switches: `State.switches`. writes: the writes to weights since then, or since the last comparison. number:
    the number of the fingerprint, which the first step assigns.
    """

    fingerprint: Fingerprint
    model: Any
    watch: Watch
    forward: Any
    switches: int
    writes: Writes
    number: int = -1

    def replaced(self) -> str | None:
        """Return a sentence about a function that has been replaced since, or None."""
        if self.model.__dict__.get("forward") is not self.forward:
            return "a forward was set on the model"
        return None if self.watch.unchanged() else self.watch.difference()


def examine(model: Any, state: State) -> ModelState:
    """Fingerprint a model. This takes a few microseconds per module."""
    watches = last_watches_of(model)
    forward = model.__dict__.get("forward")
    writes, found = Writes(model), fingerprint(model, watches)
    return ModelState(found, model, watches.step, forward, state.switches, writes)


def refuses_start(start: ModelState, state: State, ranks: Agreement, recordings: int) -> str | None:
    """Return why the steps of a call run uncaptured, or None. If one rank has a reason, all ranks return one.

    recordings: the number of recordings of the cache.
    """
    if not ranks.same(start.number, recordings):
        # Start over on all ranks, so that their counts are equal from here on.
        state.start_over()
        return "the models are in different states on different ranks"
    reason = refuses_tools()
    return None if ranks.all(reason is None) else reason or "on another rank, a tool observes the call"


def may_examine_early(model: Any, input_ids: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Return whether a model may be examined before the first step: a call has one, and no user code runs before it.

    input_ids, arguments: those of a call to `_sample` whose choice of tokens is recorded.
    """
    if arguments.get("streamer") is not None or observers(arguments) is not None:
        return False
    longer: bool = arguments["generation_config"].max_length > input_ids.shape[1] + 1
    return longer and not set_by_others(model, _BETWEEN)
