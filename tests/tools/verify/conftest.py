"""Small models of the verified types. Every test builds its own model, because verify works in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.coverage.cases import CASES

AVAILABLE = {case.id for case in CASES if case.applies}


def available(*rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Returns the rows of a table whose model, the first entry, exists in this release of transformers."""
    return [row for row in rows if row[0] in AVAILABLE]


@pytest.fixture
def build():
    def make(name: str, dtype: torch.dtype = torch.float32):
        case = next(row for row in CASES if row.id == name)
        return case.build(dtype)

    return make
