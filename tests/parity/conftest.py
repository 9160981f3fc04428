"""Checkpoints and loaded models, created once per model type and dtype."""

from __future__ import annotations

import pytest
import torch

from tests.parity import models


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    made = {}

    def make(name, dtype):
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{str(dtype).split('.')[1]}")
            made[name, dtype] = models.save_checkpoint(name, folder, dtype)
        return made[name, dtype]

    return make


@pytest.fixture(scope="session")
def trio(checkpoint):
    """Returns a function that loads three models of a checkpoint: prepared, stock, and stock in float64."""
    made = {}

    def load(name, dtype):
        if (name, dtype) not in made:
            folder = checkpoint(name, dtype)
            stock = models.load_stock(name, folder)
            made[name, dtype] = models.load_prepared(folder), stock, models.in_float64(models.load_stock(name, folder))
            assert stock.dtype == dtype
        return made[name, dtype]

    return load


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield
