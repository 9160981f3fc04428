"""Deep copies and pickles of a fused group have a separate block, created at once or at the first call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hf_rocm.layers.grouped_linear import live
from hf_rocm.layers.weight_group import PENDING, SLOT, idle
from hf_rocm.weights import fuse
from hf_rocm.weights.fuse import Fused
from tests.weights.test_fuse import X, check, make, no_grad  # noqa: F401  the fixture applies here, too


def _pickled(group):
    return pickle.loads(pickle.dumps(group))


def test_an_unpickled_group_is_fused_at_its_first_call():
    twin = _pickled(make(bias=True))
    assert twin.__dict__[SLOT] == idle(Fused, PENDING, "abc")
    with torch.enable_grad():
        twin(X)
        assert "gradients are enabled" in fuse.why_not(twin, twin.names)
    assert twin.__dict__[SLOT] == idle(Fused, PENDING, "abc") and fuse.why_not(twin, twin.names) is None
    check(twin)
    assert type(twin.__dict__[SLOT]) is Fused


def test_a_deep_copy_is_fused():
    twin = copy.deepcopy(make(bias=True))
    assert type(twin.__dict__[SLOT]) is Fused and live(twin) is twin.__dict__[SLOT]
    again = copy.deepcopy(twin)
    del twin
    assert live(again) is again.__dict__[SLOT]
    check(again)


def test_a_deep_copy_of_a_shallow_copy_or_of_a_stale_group_is_fused_at_its_first_call():
    group = make()
    shallow = copy.deepcopy(copy.copy(group))
    group.b.weight.data = torch.randn(8, 16)
    stale = copy.deepcopy(group)
    for twin in (shallow, stale):
        assert twin.__dict__[SLOT] == idle(Fused, PENDING, "abc")
        check(twin)
        assert live(twin) is not None
    assert not torch.equal(shallow.b.weight, stale.b.weight)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled])
def test_copies_have_separate_blocks(duplicate):
    group = make(bias=True)
    twin = duplicate(group)
    twin.a.weight.mul_(2)
    group.b.weight.mul_(5)
    for entry in (group, twin):
        check(entry)
        assert live(entry) is not None
    assert live(twin) is not live(group)
    assert not torch.equal(twin.a.weight, group.a.weight)


def test_a_shallow_copy_shares_the_block():
    group = make()
    assert live(copy.copy(group)) is live(group)
