"""Training in two processes: gradients, updated weights and saved files equal stock's.

The checks are functions of the scripts `training_ranks.py` and `training_sharded_ranks.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks, succeeded

CHECKS = {
    "training_ranks.py": ["plain", "checkpointed", "some_unused", "adapters", "trained_and_evaluated", "by_trainer"],
    "training_sharded_ranks.py": ["fsdp", "fsdp2", "fsdp2_by_accelerate"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", CHECKS)
def test_training_with_two_processes_passes_every_check(tmp_path, script):
    first, _ = succeeded(run_ranks(Path(__file__).with_name(script), tmp_path))
    assert [line for line in first.out.splitlines() if line in CHECKS[script]] == CHECKS[script]
