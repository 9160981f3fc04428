"""The state of recorded steps of a model: its idle caches, counts, and the reasons why calls ran uncaptured."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection
from itertools import count
from typing import Any

from torch import nn

from hf_rocm.errors import GraphError
from hf_rocm.generation import graph_teardown
from hf_rocm.generation.fingerprint import Fingerprint
from hf_rocm.generation.pool import Pool
from hf_rocm.generation.states import STEPS, States
from hf_rocm.ops.registry import Route

# In the model's __dict__: the settings of a prepared model, as builtin types, which copies and pickles keep.
SETTINGS = "_hf_rocm_graphs"

# The largest number of fingerprints that are stored, for models that switch between adapters.
_MAX_FINGERPRINTS = 16

_log = logging.getLogger("hf_rocm")


class State:
    """The state of one model, shared by the threads that call it."""

    def __init__(self, name: str, *, required: bool) -> None:
        self.name = name
        self.required = required
        self.pool = Pool()
        # The reason why recording has stopped.
        self.disabled: str | None = None
        # The same reason, if a comparison, or a check for values that are not finite, showed that a replay was wrong.
        self.wrong_replay: str | None = None
        # The number of generate calls that used a DecodeCache.
        self.calls = 0
        # The number of recorded steps.
        self.recorded = 0
        # The routes of all operations in the last recorded step.
        self.routes: Collection[Route] = ()
        # The number of replayed steps after the first comparison.
        self.replayed = 0
        # The number of these replayed steps that were compared.
        self.compared = 0
        # A counter that changes whenever a call switches the experts implementation, which all threads share.
        self.switches = 0
        # The number of calls whose assistant was not prepared and ran uncaptured.
        self.plain_assistants = 0
        # Reason → the number of calls or steps that ran uncaptured.
        self.turned_away: Counter[str] = Counter()
        self._fingerprints: dict[tuple[Fingerprint, bool], int] = {}
        self._numbers = count()
        # How often `start_over` was called, which is the same on every rank.
        self._starts = 0
        self._lock = threading.Lock()

    def disable(self, reason: str) -> None:
        """Stop recording steps of this model. Raises `GraphError` if graphs are required."""
        self.disabled = reason
        self.pool.clear()
        _log.warning("%s decodes uncaptured from now on: %s", self.name, reason)
        if self.required:
            raise refusal(self.name, reason)

    def turn_away(self, reason: str) -> None:
        """Count a call or step that runs uncaptured. Raises `GraphError` if graphs are required."""
        self.turned_away[reason] += 1
        if self.required:
            raise refusal(self.name, reason)

    def start_over(self) -> None:
        """Drop all fingerprints and idle caches, with their recordings."""
        with self._lock:
            self._fingerprints.clear()
            self._starts += 1
            # Caches in use still have recordings with the earlier numbers.
            self._numbers = count(self._starts << 32)
        self.pool.clear()

    def number_of(self, fingerprint: Fingerprint, *, probable: bool = False) -> int:
        """Return the number of this fingerprint. A fingerprint that is new, or was dropped, gets a new number.

        probable: whether recorded steps also compute probabilities (see `RecordedStep`); such steps have other numbers.
        """
        with self._lock:
            number = self._fingerprints.pop((fingerprint, probable), None)
            if number is None:
                number = next(self._numbers)
            self._fingerprints[fingerprint, probable] = number
            for oldest in list(self._fingerprints)[:-_MAX_FINGERPRINTS]:
                del self._fingerprints[oldest]
            return number


def release(model: nn.Module) -> None:
    """Free the idle caches and recordings of a model."""
    state = _states.take(model)
    if state is not None:
        state.pool.clear()
        graph_teardown.tidy()


def refusal(name: str, reason: str) -> GraphError:
    """The error for a model or call that requires graphs and whose steps can't be recorded."""
    return GraphError(
        f"{name} can't decode with graphs, which are required",
        facts={"reason": reason},
        hint="leave HF_ROCM_GRAPHS unset (or pass graphs=None) to let such calls run uncaptured",
    )


def _new(model: Any) -> State:
    return State(type(model).__name__, required=model.__dict__[SETTINGS]["required"])


_states = States(STEPS, _new)
state_of, known = _states.of, _states.known
