"""States of models. A state is an attribute of its model, so it is freed with the model.

A state references parts of its model, and these may reference the model, as hooks do. A dictionary of states would keep
such a model alive. An attribute only makes the state part of a reference cycle, which Python's garbage collector frees.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

from torch import nn

StateT = TypeVar("StateT")

# In a model's __dict__: the states of its recorded forwards and of its recorded steps. Comparisons of models ignore
# them.
FORWARDS, STEPS = "_hf_rocm_recorded_forwards", "_hf_rocm_recorded_steps"
# Attributes of models and modules with records on which no recording depends.
NOTES = frozenset(
    (
        "_hf_rocm_stayed",
        "_hf_rocm_report",
        "_hf_rocm_inputs_note",
        "_compiled_call",
        "_last_compile_config",
        FORWARDS,
        STEPS,
    )
)


class States(Generic[StateT]):
    """One state per model. name: that of the attribute. make(model) creates the state. All methods are thread-safe.

    A copied or pickled model starts without a state.
    """

    def __init__(self, name: str, make: Callable[[Any], StateT]) -> None:
        self._name = name
        self._make = make
        self._lock = threading.Lock()

    def of(self, model: Any) -> StateT:
        """Return the state of a model, created on the first call."""
        state = self.known(model)
        if state is None:
            with self._lock:
                state = self.known(model)
                if state is None:
                    state = self._make(model)
                    model.__dict__[self._name] = _Stored(model, state)
        return state

    def known(self, model: nn.Module) -> StateT | None:
        """Return the state of a model, if it has one."""
        stored: Any = model.__dict__.get(self._name)
        # A shallow copy has the attribute of the original.
        if stored.__class__ is not _Stored or stored.owner() is not model:
            return None
        state: StateT | None = stored.state
        return state

    def take(self, model: nn.Module) -> StateT | None:
        """Remove the state of a model and return it, if it has one."""
        with self._lock:
            state = self.known(model)
            stored = model.__dict__.pop(self._name, None)
            if state is not None:
                # Shallow copies of the model also reference `stored`.
                stored.state = None
            return state


class _Stored:
    """The value of the attribute: a state, and a weak reference to its model, the owner.

    In a deepcopied or pickled model, the value is an empty dict, so that the pickle can be loaded without hf_rocm.
    """

    __slots__ = ("__weakref__", "owner", "state")

    def __init__(self, model: nn.Module, state: Any) -> None:
        self.state = state
        # A shallow copy of the model, which may outlive it, also references this object.
        self.owner = ref(model, partial(_clear, ref(self)))

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        # `torch.load` accepts this type with `weights_only=True`, too.
        return OrderedDict, ()


def _clear(reference: ReferenceType[_Stored], _: object) -> None:
    stored = reference()
    if stored is not None:
        stored.state = None
