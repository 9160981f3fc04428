"""The trained model with recorded steps, replayed on a CPU."""

from __future__ import annotations

import pytest

from tests.generation.conftest import counted
from tests.trained import NEW, Trained, check_greedy_tokens, check_logits


@pytest.fixture
def trained(tiny_checkpoint, recorded_on_cpu):
    return Trained(tiny_checkpoint, graphs=True)


def test_512_greedy_tokens_equal_stock(trained):
    prepared, _ = check_greedy_tokens(trained)
    recorded, replayed = counted(prepared)
    # A step is recorded again whenever the buffers grow.
    assert recorded > 1 and replayed > NEW - 4 * recorded


def test_bf16_predictions_are_as_good_as_those_of_eager(trained):
    check_logits(trained)
