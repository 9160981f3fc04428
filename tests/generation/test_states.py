"""Every model has one state, which is created once and freed with the model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import torch
from torch import nn

from hf_rocm.generation.states import States


class State:
    def __init__(self, model):
        self.name = type(model).__name__


def test_a_model_has_one_state_and_a_copy_has_none():
    states, model = States("_state", State), nn.Linear(2, 2)
    assert states.known(model) is None
    state = states.of(model)
    assert state.name == "Linear" and states.of(model) is state and states.known(model) is state
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert states.known(other) is None and states.of(other) is not state


def test_a_state_that_was_taken_is_created_anew():
    states, model = States("_state", State), nn.Linear(2, 2)
    state = states.of(model)
    assert states.take(model) is state and states.take(model) is None and states.known(model) is None
    assert states.of(model) is not state


def test_a_state_is_freed_with_its_model():
    states, model = States("_state", State), nn.Linear(2, 2)
    state = weakref.ref(states.of(model))
    del model
    gc.collect()
    assert state() is None


def test_threads_get_the_same_state():
    created, start = [], threading.Barrier(8)

    def make(model):
        created.append(model)
        return State(model)

    states, model, results = States("_state", make), nn.Linear(2, 2), []

    def run():
        start.wait()
        results.append(states.of(model))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(created) == 1 and len(set(map(id, results))) == 1 and len(results) == 8


class Chain:
    """A state that references a part of its model."""

    def __init__(self, model):
        self.part = model[0]


def test_a_model_whose_part_references_it_is_freed_with_its_state():
    states, model = States("_state", Chain), nn.Sequential(nn.Linear(2, 2))
    model[0].__dict__["owner"] = model
    references = weakref.ref(states.of(model)), weakref.ref(model)
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * 2


def test_a_shallow_copy_has_its_own_state_and_does_not_keep_that_of_the_original():
    states, model = States("_state", State), nn.Linear(2, 2)
    state = states.of(model)
    twin, untouched = copy.copy(model), copy.copy(model)
    assert states.known(twin) is None and states.take(twin) is None and states.known(model) is state
    assert states.of(twin) is not state and states.known(model) is state
    assert states.take(model) is state and states.known(twin) is not None
    state = states.of(model)
    another, reference = copy.copy(model), weakref.ref(state)
    del model, state
    assert reference() is None and states.known(another) is states.known(untouched) is None


def test_the_state_is_an_attribute_until_it_is_taken():
    states, model = States("_state", State), nn.Linear(2, 2)
    before = dict(model.__dict__)
    states.of(model)
    assert model.__dict__.keys() - before.keys() == {"_state"}
    assert model.state_dict().keys() == {"weight", "bias"} and repr(model) == repr(nn.Linear(2, 2))
    states.take(model)
    assert model.__dict__ == before


def test_a_pickle_is_loaded_without_hf_rocm():
    states, model = States("_state", State), nn.Linear(2, 2)
    states.of(model)
    written = pickle.dumps(model)
    assert b"hf_rocm" not in written
    model.__dict__["_state"] = None
    buffer = io.BytesIO()
    states.of(model)
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([nn.Linear]):
        again = torch.load(buffer, weights_only=True)
    assert states.known(again) is None and states.of(again) is not states.of(model)
