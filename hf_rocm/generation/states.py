"""States of models, in a dictionary with weak references to the models.

States are not stored in the model, so a copied or pickled model starts without one. A state is freed with its model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

StateT = TypeVar("StateT")


class States(Generic[StateT]):
    """One state per model. make(model) creates it. All methods are thread-safe."""

    def __init__(self, make: Callable[[Any], StateT]) -> None:
        self._make = make
        self._states: WeakKeyDictionary[nn.Module, StateT] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, model: Any) -> StateT:
        """Return the state of a model, created on the first call."""
        state = self._states.get(model)
        if state is None:
            with self._lock:
                state = self._states.get(model)
                if state is None:
                    state = self._states[model] = self._make(model)
        return state

    def known(self, model: nn.Module) -> StateT | None:
        """Return the state of a model, if it has one."""
        return self._states.get(model)

    def take(self, model: nn.Module) -> StateT | None:
        """Remove the state of a model and return it, if it has one."""
        with self._lock:
            return self._states.pop(model, None)
