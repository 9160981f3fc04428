"""What graph decode knows of a model: its idle caches, what was recorded, and why something was not.

Found by the model itself and held weakly, beside it and not in it: a copy of a model, or one that was pickled, starts
with nothing, and what belongs to a model goes with it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hf_rocm.errors import GraphError
from hf_rocm.generation import ending
from hf_rocm.generation.fingerprint import Fingerprint
from hf_rocm.generation.pool import Pool

# In the model's __dict__: the settings of a prepared model, as plain builtins that copies and pickles carry.
SETTINGS = "_hf_rocm_graphs"

# Fingerprints that are remembered: adapters that take turns.
_MOST = 16

_log = logging.getLogger("hf_rocm")


class State:
    """Of one model, shared by the threads that call it."""

    def __init__(self, name: str, *, required: bool) -> None:
        self.name = name
        self.required = required
        self.pool = Pool()
        self.disabled: str | None = None  # why nothing is recorded any more
        self.calls = 0  # of generate, over a cache of ours
        self.recorded = 0
        self.replayed = 0  # steps
        self.turned_away: Counter[str] = Counter()  # reason → calls or steps that ran uncaptured
        self._fingerprints: dict[Fingerprint, int] = {}
        self._numbers = count()
        self._lock = threading.Lock()

    def disable(self, reason: str) -> None:
        """Record nothing of this model from here on. Raises `GraphError` where graphs are required."""
        self.disabled = reason
        self.pool.clear()
        _log.warning("%s decodes uncaptured from here on: %s", self.name, reason)
        if self.required:
            raise refusal(self.name, reason)

    def turn_away(self, reason: str) -> None:
        """Let this call or step run uncaptured. Raises `GraphError` where graphs are required."""
        self.turned_away[reason] += 1
        if self.required:
            raise refusal(self.name, reason)

    def start_over(self) -> None:
        """Forget what was recorded, and every fingerprint."""
        with self._lock:
            self._fingerprints.clear()
            self._numbers = count()
        self.pool.clear()

    def number_of(self, found: Fingerprint) -> int:
        """A number for this fingerprint: the one that it had before, or a new one if it was forgotten since."""
        with self._lock:
            number = self._fingerprints.pop(found, None)
            if number is None:
                number = next(self._numbers)
            self._fingerprints[found] = number
            for oldest in list(self._fingerprints)[:-_MOST]:
                del self._fingerprints[oldest]
            return number


def state_of(model: Any) -> State:
    """The state of a prepared model, made if it has none yet."""
    with _lock:
        found = _states.get(model)
        if found is None:
            found = _states[model] = State(type(model).__name__, required=model.__dict__[SETTINGS]["required"])
        return found


def known(model: nn.Module) -> State | None:
    """The state of a model, if it has one."""
    return _states.get(model)


def release(model: nn.Module) -> None:
    """Give back what is kept for the next call: caches and recordings."""
    with _lock:
        found = _states.pop(model, None)
    if found is not None:
        found.pool.clear()
        ending.tidy()


def refusal(name: str, reason: str) -> GraphError:
    """What is raised where graphs are required and can't be had."""
    return GraphError(
        f"{name} can't decode with graphs, which are required",
        facts={"reason": reason},
        hint="leave HF_ROCM_GRAPHS unset (or graphs=None) to let such calls run uncaptured",
    )


_states: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()
_lock = threading.Lock()
