"""Random calls in fp32, with steps replayed on a CPU, return stock's tokens.

tests/gpu/test_soak.py repeats the calls on a GPU.
"""

from __future__ import annotations

import gc

import pytest
import torch

from tests.generation.soak import CHANGES, FAMILIES, Soak
from tests.releases import in_the_newest

pytestmark = pytest.mark.usefixtures("recorded_on_cpu")

CALLS, IN_THREADS, AFTER_CHANGES = 60, 12, 4


@in_the_newest
def test_the_newest_release_has_sixteen_families():
    assert len(FAMILIES) == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls_return_stock_tokens(family):
    soak = Soak(family, longest=18)
    assert soak.differing(range(CALLS)) == []
    soak.assert_recorded(CALLS)
    assert soak.differing_in_threads(range(CALLS), limit=IN_THREADS) == []
    for change in CHANGES:
        assert soak.differing_after(change, range(AFTER_CHANGES)) == []
    soak.assert_recorded(CALLS + IN_THREADS)


@in_the_newest
def test_memory_does_not_grow():
    # the limit is one row of logits (244 bytes) per call; growth of up to 20 KiB in total has been measured
    assert Soak("llama").grown(200, memory_of_tensors) < 200 * 244


def memory_of_tensors():
    """The number of bytes of all tensors that Python's garbage collector tracks."""
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
