"""Two ranks that load together first compare their facts. If these differ, both raise the same error.

Rank 0 logs the messages that both ranks emit during a load.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks, succeeded, torchrun
from tests.distributed.test_failures import save

SCRIPT = Path(__file__).with_name("loading_ranks.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["plain", "torchrun"])
def observations(request, tmp_path_factory):
    """The observations of each rank. The ranks are started as plain processes or by torchrun."""
    folder = tmp_path_factory.mktemp("checkpoints")
    two, three = save(folder / "two", heads=4, groups=2), save(folder / "three", heads=6, groups=3)
    if request.param == "plain":
        lines = [rank.out for rank in succeeded(run_ranks(SCRIPT, two, three, timeout=240))]
    else:
        result = torchrun(SCRIPT, two, three, timeout=240)
        assert result.code == 0 and not result.left, result.log
        lines = result.out.splitlines()
    ranks = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(ranks) == 2
    return ranks


def test_differences_raise_the_same_error_on_both_ranks(observations):
    first, second = observations
    for name in ("heads", "dtype", "option"):
        assert first[name] == second[name], name
    assert re.search(r"argument (torch_)?dtype  torch\.float32 on rank 0 .*; torch\.float64 on rank 1", first["dtype"])
    assert "they differ in: option tiers" in first["option"] and "'eager'" in first["option"]


def test_indivisible_heads_are_refused_early(observations):
    for rank in observations:
        assert rank["heads"].startswith("the attention heads can't be divided among 2 ranks: 3 (num_key_value_heads)")
        assert "shape" in rank["stock heads"]


def test_both_ranks_count_the_same_number_of_comparisons(observations):
    assert [rank["calls"] for rank in observations] == [3, 3]


def test_one_rank_logs_the_messages_of_a_load(observations):
    logging_rank, other_rank = sorted(observations, key=lambda rank: rank["rank"])
    assert len(logging_rank["stock messages"]) == 1 and "stays stock" in logging_rank["stock messages"][0]
    assert len(logging_rank["own messages"]) == 1 and "int8" in logging_rank["own messages"][0]
    # in a single-process load, a rank waits only briefly for rank 0, and logs what rank 0 has not logged by then
    assert all(words.startswith("rank 1: ") for words in other_rank["stock messages"] + other_rank["own messages"])
