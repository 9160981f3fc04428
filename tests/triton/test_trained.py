"""The trained model through our kernels, interpreted, which takes seconds for some tokens: tests/gpu has all 512."""

from __future__ import annotations

import pytest

from tests.trained import KERNELS, Trained, generates_stocks_tokens, judges_tokens_as_well_as_eager


@pytest.fixture
def trained(tiny_checkpoint):
    return Trained(tiny_checkpoint, graphs=False)  # a replay on a CPU doesn't see what the interpreter does


@pytest.mark.slow
def test_greedy_tokens_are_stocks(trained):
    _, served = generates_stocks_tokens(trained, new=24)
    assert served >= KERNELS


@pytest.mark.slow
def test_bf16_teacher_forced(trained):
    assert judges_tokens_as_well_as_eager(trained) >= KERNELS
