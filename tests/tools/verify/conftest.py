"""Small models of the types that are verified, built anew for each test: verify works in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.coverage.cases import CASES

HERE = {case.id for case in CASES if case.here}


def those_here(*rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The rows of a table whose model, their first entry, this release has."""
    return [row for row in rows if row[0] in HERE]


@pytest.fixture
def build():
    def make(name: str, dtype: torch.dtype = torch.float32):
        case = next(each for each in CASES if each.id == name)
        return case.build(dtype)

    return make
