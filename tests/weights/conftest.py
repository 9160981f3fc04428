"""A small real Llama, prepared, and what must hold of it whatever is done to it."""

from __future__ import annotations

import pytest
import torch

from tests.weights import models


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def stock():
    """A stock model."""
    return models.build()


@pytest.fixture
def model():
    """The same model, prepared."""
    return models.prepared()
