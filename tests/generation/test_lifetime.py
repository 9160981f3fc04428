"""Recorded steps do not keep a model alive, and copies of a model start without them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import hf_rocm
from hf_rocm.forwards import state as forwards
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make


def test_a_model_that_references_itself_is_freed(pair):
    """Recorded steps reference the weight of a norm, which references the model."""
    prepared, stock = pair()
    prepared.model.norm.weight.owner = prepared
    for _ in range(2):
        assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared)[1]
    # Recorded prompts reference the weight, too.
    forwards.release(prepared)
    references = weakref.ref(prepared), weakref.ref(known(prepared)), weakref.ref(next(prepared.parameters()))
    del prepared
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_starts_without_recordings(duplicate, pair):
    prepared, stock = pair()
    expected = generate(stock)
    generate(prepared)
    state, counts = known(prepared), counted(prepared)
    twin = duplicate(prepared)
    assert known(twin) is None and torch.equal(generate(twin), expected)
    assert counted(twin)[1] and known(twin) is not state
    assert known(prepared) is state and counted(prepared) == counts
    assert torch.equal(generate(prepared), expected) and counted(prepared)[0] == counts[0]


def test_restore_leaves_the_attributes_of_the_stock_model(recorded_on_cpu):
    model = make("llama")
    before = dict(model.__dict__)
    generate(hf_rocm.prepare(model, force=True, graphs=True))
    assert counted(model)[1] and before != model.__dict__
    hf_rocm.restore(model)
    assert before == model.__dict__ and known(model) is None
