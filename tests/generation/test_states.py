"""Every model has one state, which is created once and freed with the model."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

from torch import nn

from hf_rocm.generation.states import States


class State:
    def __init__(self, model):
        self.name = type(model).__name__


def test_a_model_has_one_state_and_a_copy_has_none():
    states, model = States(State), nn.Linear(2, 2)
    assert states.known(model) is None
    state = states.of(model)
    assert state.name == "Linear" and states.of(model) is state and states.known(model) is state
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert states.known(other) is None and states.of(other) is not state


def test_a_state_that_was_taken_is_created_anew():
    states, model = States(State), nn.Linear(2, 2)
    state = states.of(model)
    assert states.take(model) is state and states.take(model) is None and states.known(model) is None
    assert states.of(model) is not state


def test_a_state_is_freed_with_its_model():
    states, model = States(State), nn.Linear(2, 2)
    state = weakref.ref(states.of(model))
    del model
    gc.collect()
    assert state() is None


def test_threads_get_the_same_state():
    created, start = [], threading.Barrier(8)

    def make(model):
        created.append(model)
        return State(model)

    states, model, results = States(make), nn.Linear(2, 2), []

    def run():
        start.wait()
        results.append(states.of(model))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(created) == 1 and len(set(map(id, results))) == 1 and len(results) == 8
