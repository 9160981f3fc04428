"""Models of a case, built once per dtype."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch

import hf_rocm
from tests.coverage.case import Case
from tests.coverage.cases import CASES
from tests.coverage.routing import route_in_float64


@lru_cache(maxsize=2)
def _built(case: Case, dtype: torch.dtype):
    stock = case.build(dtype)
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    exact = copy.deepcopy(stock).double()
    if case.has_routed_experts() and hasattr(exact, "set_experts_implementation"):
        # grouped_mm does not support float64.
        exact.set_experts_implementation("eager")
    if case.has_routed_experts():
        route_in_float64(exact)
    return prepared, stock, exact


@pytest.fixture
def trio(case):
    """A function that returns (prepared, stock, stock in float64) for a dtype. Tests must not change these models."""
    return lambda dtype=torch.float32: _built(case, dtype)


def pytest_collection_modifyitems(items):
    coverage_items = [item for item in items if "tests/coverage/" in item.nodeid]
    # run all tests of a model in a row, so that it is built once per dtype
    order = {id(case): place for place, case in enumerate(CASES)}
    places = [place for place, item in enumerate(items) if item in coverage_items]
    coverage_items.sort(key=lambda item: order.get(id(_case_of(item)), -1))
    for place, item in zip(places, coverage_items, strict=True):
        items[place] = item


def _case_of(item):
    return getattr(item, "callspec", None) and item.callspec.params.get("case")
