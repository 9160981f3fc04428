"""A model sharded over two GPUs returns stock's tokens from recorded steps that include the all-reduces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks, succeeded
from tests.generation.conftest import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: needs two GPUs"),
]


def test_recorded_steps_include_the_all_reduces(tmp_path: Path) -> None:
    make("llama", hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=504).save_pretrained(
        tmp_path / "model"
    )
    script = Path(__file__).with_name("tensor_parallel_ranks.py")
    succeeded(run_ranks(script, tmp_path / "model", tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0,1"}))
    for rank in range(2):
        data = json.loads((tmp_path / f"{rank}.json").read_text())
        assert data["prepared"] == data["stock"]
        assert (data["recorded"], data["replayed"]) == (1, 23 - 3 + 11), data
