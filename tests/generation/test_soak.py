"""Random calls return stock's tokens, in fp32, replayed on a CPU. tests/gpu/test_soak.py runs more of them."""

from __future__ import annotations

import pytest

from tests.generation.conftest import counted
from tests.generation.soak import same_tokens


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_random_calls(kind, pair):
    prepared, stock = pair(kind)
    assert same_tokens(prepared, stock, range(18)) == []
    assert counted(prepared)[1] > 30
