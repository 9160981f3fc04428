"""Two ranks load together: they agree before, in the same words where they can't, and one of them speaks."""

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
def seen(request, tmp_path_factory):
    """What each rank saw, started by hand and by torchrun."""
    folder = tmp_path_factory.mktemp("checkpoints")
    two, three = save(folder / "two", heads=4, groups=2), save(folder / "three", heads=6, groups=3)
    if request.param == "plain":
        lines = [each.out for each in succeeded(run_ranks(SCRIPT, two, three, timeout=240))]
    else:
        result = torchrun(SCRIPT, two, three, timeout=240)
        assert result.code == 0 and not result.left, result.log
        lines = result.out.splitlines()
    ranks = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(ranks) == 2
    return ranks


def test_what_differs_is_refused_by_both_in_the_same_words(seen):
    first, second = seen
    for name in ("heads", "dtype", "option"):
        assert first[name] == second[name], name
    assert re.search(r"argument (torch_)?dtype  torch\.float32 on rank 0 .*; torch\.float64 on rank 1", first["dtype"])
    assert "they differ in: option tiers" in first["option"] and "'eager'" in first["option"]


def test_heads_that_can_not_be_divided_are_refused_where_stock_fails_later(seen):
    for rank in seen:
        assert rank["heads"].startswith("3 (num_key_value_heads) heads can't be divided among 2 ranks")
        assert "shape" in rank["stock heads"]


def test_ranks_that_agree_load_again_and_again_and_count_alike(seen):
    assert [rank["calls"] for rank in seen] == [3, 3]


def test_what_a_load_says_comes_from_one_rank(seen):
    speaks, listens = sorted(seen, key=lambda rank: rank["rank"])
    assert len(speaks["stock said"]) == 1 and "stays stock" in speaks["stock said"][0]
    assert len(speaks["own said"]) == 1 and "int8" in speaks["own said"][0]
    # loads that are its own a rank doesn't hold up for long: then it says itself what the first has not said yet
    assert all(words.startswith("rank 1: ") for words in listens["stock said"] + listens["own said"])
