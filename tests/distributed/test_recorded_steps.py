"""Recorded decode steps of a model that transformers shards across two ranks, which use gloo on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks, succeeded
from tests.distributed.recording_ranks import CHECKS
from tests.generation.conftest import make

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The results of each of the two ranks: check → error message, empty if the check passed."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make("llama", vocab_size=62).save_pretrained(folder)
    ranks = succeeded(run_ranks(Path(__file__).with_name("recording_ranks.py"), folder))
    return [json.loads(rank.out.splitlines()[-1]) for rank in ranks]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_recorded_steps_equal_stock_on_every_rank(reports: list[dict[str, str]], check: str) -> None:
    for rank, report in enumerate(reports):
        assert report[check] == "", f"rank {rank}: {report[check]}"
