"""Copies and pickles of a fused group: blocks of their own, fused by copying or at their first call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hf_rocm.weights import fuse
from hf_rocm.weights.block import Fused
from tests.weights.test_fuse import X, make, no_grad, same  # noqa: F401  the fixture holds here too


def _pickled(group):
    return pickle.loads(pickle.dumps(group))


def test_an_unpickled_group_fuses_itself_at_its_first_call():
    twin = _pickled(make(bias=True))
    assert twin.__dict__[fuse.STATE] == ("a", "b", "c")
    with torch.enable_grad():
        twin(X)
        assert "gradients are on" in fuse.why_not(twin, twin.names)
    assert twin.__dict__[fuse.STATE] == ("a", "b", "c") and fuse.why_not(twin, twin.names) is None
    same(twin)
    assert type(twin.__dict__[fuse.STATE]) is Fused


def test_a_deep_copy_is_fused_by_copying():
    twin = copy.deepcopy(make(bias=True))
    assert type(twin.__dict__[fuse.STATE]) is Fused and fuse.fused(twin) is twin.__dict__[fuse.STATE]
    again = copy.deepcopy(twin)
    del twin
    assert fuse.fused(again) is again.__dict__[fuse.STATE]
    same(again)


def test_a_deep_copy_of_a_shallow_copy_or_of_a_group_that_went_stale_is_left_to_its_first_call():
    group = make()
    shallow = copy.deepcopy(copy.copy(group))
    group.b.weight.data = torch.randn(8, 16)
    stale = copy.deepcopy(group)
    for twin in (shallow, stale):
        assert twin.__dict__[fuse.STATE] == ("a", "b", "c")
        same(twin)
        assert fuse.fused(twin) is not None
    assert not torch.equal(shallow.b.weight, stale.b.weight)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled])
def test_copies_have_blocks_of_their_own(duplicate):
    group = make(bias=True)
    twin = duplicate(group)
    twin.a.weight.mul_(2)
    group.b.weight.mul_(5)
    for each in (group, twin):
        same(each)
        assert fuse.fused(each) is not None
    assert fuse.fused(twin) is not fuse.fused(group)
    assert not torch.equal(twin.a.weight, group.a.weight)


def test_a_shallow_copy_shares_the_block():
    group = make()
    assert fuse.fused(copy.copy(group)) is fuse.fused(group)
