"""The stopping criteria of recorded steps stop where transformers' own stop."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria

from hf_rocm.generation import stop_criteria
from tests.generation.conftest import counted, generate


def of(*criteria):
    return stop_criteria.of_call({"stopping_criteria": StoppingCriteriaList(criteria)})


LISTS = {
    "length": [MaxLengthCriteria(9)],
    "length and position": [MaxLengthCriteria(9, max_position_embeddings=5)],
    "end": [EosTokenCriteria([3, 7]), MaxLengthCriteria(9)],
    "end alone": [EosTokenCriteria(3)],
    "nothing": [],
}


@pytest.mark.parametrize("name", LISTS)
def test_the_same_rows_stop_at_the_same_length(name):
    criteria = LISTS[name]
    ours, stock = of(*criteria), StoppingCriteriaList(criteria)
    assert list(ours) == criteria and ours.max_length == stock.max_length
    ids = torch.randint(0, 9, (3, 12), generator=torch.Generator().manual_seed(0))
    for length in range(1, 13):
        mine, other = ours(ids[:, :length], None), stock(ids[:, :length], None)
        assert torch.equal(mine, other) and mine.dtype == other.dtype and mine.shape == other.shape


def test_a_length_that_changes_during_a_call():
    length = MaxLengthCriteria(9)
    ours, ids = of(length), torch.zeros((2, 5), dtype=torch.int64)
    assert not ours(ids, None).any()
    length.max_length = 5
    assert ours(ids, None).all()


def test_other_criteria_are_not_replaced():
    class Own(MaxLengthCriteria):
        pass

    class OwnList(StoppingCriteriaList):
        pass

    for criteria in ([MaxTimeCriteria(9.0)], [Own(9)], [EosTokenCriteria(1), EosTokenCriteria(2)]):
        assert of(*criteria) is None
    assert stop_criteria.of_call({"stopping_criteria": OwnList([MaxLengthCriteria(9)])}) is None


def test_the_warning_about_the_position_is_logged_as_in_stock(pair, caplog, monkeypatch):
    prepared, stock = pair(max_position_embeddings=24)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    texts = []
    for model in (stock, prepared):
        type(stopping_criteria.logger).warning_once.cache_clear()
        caplog.clear()
        with caplog.at_level("WARNING"):
            tokens = generate(model, new=24)
        texts.append(([text for text in caplog.messages if "maximum length" in text], tokens))
    assert texts[0][0] == texts[1][0] != []
    assert torch.equal(texts[0][1], texts[1][1]) and counted(prepared)[1]
