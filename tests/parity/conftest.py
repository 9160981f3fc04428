"""Checkpoints and loaded models, created once per model type and dtype."""

from __future__ import annotations

import pytest
import torch

from tests.parity import models


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folders = {}

    def make(name, dtype):
        if (name, dtype) not in folders:
            folder = tmp_path_factory.mktemp(f"{name}-{str(dtype).split('.')[1]}")
            folders[name, dtype] = models.save_checkpoint(name, folder, dtype)
        return folders[name, dtype]

    return make


@pytest.fixture(scope="session")
def trio(checkpoint):
    """Returns a function that loads three models of a checkpoint: prepared, stock, and stock in float64."""
    models_by_name = {}

    def load(name, dtype):
        if (name, dtype) not in models_by_name:
            folder = checkpoint(name, dtype)
            stock = models.load_stock(name, folder)
            models_by_name[name, dtype] = (
                models.load_prepared(folder),
                stock,
                models.in_float64(models.load_stock(name, folder)),
            )
            assert stock.dtype == dtype
        return models_by_name[name, dtype]

    return load


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield
