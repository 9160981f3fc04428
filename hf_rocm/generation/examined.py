"""Skip the examination of a model's modules as long as nothing in the model changes.

Every call to `generate` would examine all modules three times: for user code that a replay would skip, for their
devices, and for the fingerprint. Comparing a snapshot takes a tenth of the time.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from hf_rocm.generation import decide
from hf_rocm.generation.fingerprint import IGNORED, Fingerprint
from hf_rocm.generation.snapshot import Snapshot
from hf_rocm.weights import shuffled_copy

# The largest number of snapshots of a model. If it changes more often, its modules are examined in every call.
_MOST_SNAPSHOTS = 16


class Examined:
    """The last state in which a model was examined and nothing prevented recording. The methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        # (what surrounds the model, whether steps compute probabilities) → the number of the fingerprint.
        self._numbers: dict[tuple[Fingerprint, bool], int] = {}
        self._snapshots = 0
        # The number that was noted last.
        self._last: int | None = None

    def holds(self, model: Any) -> bool:
        """Return whether the model is still in that state.

        Always False with several ranks or with shuffled copies of weights, whose state is not in the model's modules.
        """
        with self._lock:
            return self._holds(model)

    def _holds(self, model: Any) -> bool:
        snapshot = self._snapshot
        if snapshot is None or shuffled_copy.in_use() or _has_ranks():
            return False
        if snapshot.in_place() and snapshot.unchanged(model):
            return True
        self._snapshot = None
        return False

    def number(self, model: Any, outside: Fingerprint, *, probable: bool) -> int | None:
        """Return the noted number of the model's fingerprint in these surroundings, or None if it must be examined."""
        with self._lock:
            return self._numbers.get((outside, probable)) if self._holds(model) else None

    def note(self, model: Any, outside: Fingerprint, number: int, *, probable: bool) -> None:
        """Note the number of the model's fingerprint. A state that is noted twice in a row may be recognised later."""
        with self._lock:
            repeated, self._last = number == self._last, number
            if not repeated or self._snapshots >= _MOST_SNAPSHOTS:
                return
            if not self._holds(model):
                self._numbers = {}
                if decide.refuses_device(model) is not None or decide.refuses_modules(model) is not None:
                    return
                snapshot = Snapshot(model, self._snapshots, ignored=IGNORED)
                self._snapshots += 1
                if snapshot.refused is not None:
                    return
                self._snapshot = snapshot
            self._numbers[outside, probable] = number

    def forget(self) -> None:
        """Forget all states."""
        with self._lock:
            self._snapshot, self._numbers, self._last = None, {}, None


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
