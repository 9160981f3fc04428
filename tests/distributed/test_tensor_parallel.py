"""Tensor parallelism by transformers with a prepared model: two ranks over gloo, compared with the stock model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.coverage.cases import CASES
from tests.distributed.launch import run_ranks, succeeded
from tests.distributed.sharded_ranks import CHECKS

pytestmark = pytest.mark.slow

MODELS = ("gemma2", "llama", "mixtral", "qwen3")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    """The results of each of the two ranks: model → check → error message."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        if case.overlay in MODELS and not case.variant:
            # up to transformers 5.20, the vocabulary size must be divisible by the number of ranks
            even = replace(case, arguments={**case.arguments, "vocab_size": 132})
            even.build().save_pretrained(folder / case.overlay)
    script = Path(__file__).with_name("sharded_ranks.py")
    ranks = succeeded(run_ranks(script, folder, tmp_path_factory.mktemp("saved")))
    lines = [[json.loads(line) for line in rank.out.splitlines() if line.startswith("{")] for rank in ranks]
    return [{name: checks for line in rank for name, checks in line.items()} for rank in lines]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("model", MODELS)
def test_sharded_models_equal_stock_on_every_rank(
    reports: list[dict[str, dict[str, str]]], model: str, check: str
) -> None:
    for rank, report in enumerate(reports):
        assert report[model][check] == "", f"rank {rank}: {report[model][check]}"
