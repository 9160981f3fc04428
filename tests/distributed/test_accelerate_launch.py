"""`accelerate launch` with two processes; accelerated.py contains the checks that each process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import free_port, run_ranks, succeeded
from tests.weights import models


@pytest.mark.slow
def test_accelerate_launch_runs_two_processes(tmp_path):
    models.build().save_pretrained(tmp_path / "checkpoint")
    # `--multi_gpu` starts several processes; the script selects the CPU
    options = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    (result,) = succeeded(
        run_ranks(
            "-m",
            "accelerate.commands.launch",
            *options,
            f"--main_process_port={free_port()}",
            Path(__file__).with_name("accelerated.py"),
            tmp_path / "checkpoint",
            tmp_path,
            world=1,
        )
    )
    assert result.out.split() == ["prompts_are_split", "wrapped_and_unwrapped", "mixed_precision"]
