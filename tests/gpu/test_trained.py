"""The trained model on a GPU runs hf_rocm's kernels in recorded steps."""

from __future__ import annotations

import pytest

from tests.conftest import train_tiny
from tests.generation.conftest import counted
from tests.trained import KERNELS, NEW, Trained, check_greedy_tokens, check_logits

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    train_tiny().train(out, steps=200)
    return Trained(out, "cuda", graphs=True)


def test_512_greedy_tokens_equal_stock(trained):
    prepared, served = check_greedy_tokens(trained)
    recorded, replayed = counted(prepared)
    assert recorded > 0 and replayed >= NEW - 4 * recorded
    # On a GPU, fp32 attention is left to PyTorch.
    assert served >= KERNELS


def test_bf16_predictions_are_as_good_as_those_of_eager(trained):
    assert check_logits(trained) >= KERNELS
