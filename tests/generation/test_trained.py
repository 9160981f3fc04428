"""The trained model with recorded steps, replayed on a CPU."""

from __future__ import annotations

import pytest

from tests.generation.conftest import counted
from tests.trained import NEW, Trained, generates_stocks_tokens, judges_tokens_as_well_as_eager


@pytest.fixture
def trained(tiny_checkpoint, recorded_on_cpu):
    return Trained(tiny_checkpoint, graphs=True)


def test_512_greedy_tokens_equal_stock(trained):
    prepared, _ = generates_stocks_tokens(trained)
    recorded, replayed = counted(prepared)
    # A step is recorded again whenever the buffers grow.
    assert recorded > 1 and replayed > NEW - 4 * recorded


def test_bf16_predictions_are_as_good_as_those_of_eager(trained):
    judges_tokens_as_well_as_eager(trained)
