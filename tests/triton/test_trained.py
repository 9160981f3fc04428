"""The trained model with the Triton kernels. A few tokens take seconds, so tests/gpu runs all 512."""

from __future__ import annotations

import pytest

from tests.trained import KERNELS, Trained, check_greedy_tokens, check_logits


@pytest.fixture
def trained(tiny_checkpoint):
    # On a CPU, a replay does not repeat the interpreter's work.
    return Trained(tiny_checkpoint, graphs=False)


@pytest.mark.slow
def test_greedy_tokens_equal_stock(trained):
    _, served = check_greedy_tokens(trained, new=24)
    assert served >= KERNELS


@pytest.mark.slow
def test_bf16_predictions_are_as_good_as_those_of_eager(trained):
    assert check_logits(trained) >= KERNELS
