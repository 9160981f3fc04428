"""The stopping criteria of recorded steps stop the same rows at the same length as transformers' own criteria."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria

from hf_rocm.generation import stop_criteria
from hf_rocm.generation.host_tokens import HostTokens
from tests.generation.conftest import counted, generate


def replaced_criteria(*criteria):
    return stop_criteria.replacement({"stopping_criteria": StoppingCriteriaList(criteria)})["stopping_criteria"]


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
    replaced, stock = replaced_criteria(*criteria), StoppingCriteriaList(criteria)
    assert list(replaced) == criteria and replaced.max_length == stock.max_length
    ids = torch.randint(0, 9, (3, 12), generator=torch.Generator().manual_seed(0))
    for length in range(1, 13):
        actual, expected = replaced(ids[:, :length], None), stock(ids[:, :length], None)
        assert torch.equal(actual, expected) and actual.dtype == expected.dtype and actual.shape == expected.shape


def test_a_length_that_changes_during_a_call_takes_effect():
    length = MaxLengthCriteria(9)
    replaced, ids = replaced_criteria(length), torch.zeros((2, 5), dtype=torch.int64)
    assert not replaced(ids, None).any()
    length.max_length = 5
    assert replaced(ids, None).all()


def test_other_criteria_are_called_by_stocks_list():
    calls = []

    class Own(MaxLengthCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            calls.append(input_ids)
            return super().__call__(input_ids, scores, **kwargs)

    class OwnList(StoppingCriteriaList):
        pass

    ids = torch.tensor([[3, 4, 1], [3, 4, 2]])
    for criteria in ([MaxTimeCriteria(9.0)], [Own(9)], [EosTokenCriteria(1), EosTokenCriteria(2)], [Own(3)]):
        assert torch.equal(replaced_criteria(*criteria)(ids, None), StoppingCriteriaList(criteria)(ids, None))
    assert len(calls) == 4
    assert stop_criteria.replacement({"stopping_criteria": OwnList([MaxLengthCriteria(9)])}) == {}


def test_criteria_that_are_added_during_a_call_are_called():
    criteria = StoppingCriteriaList([MaxLengthCriteria(9)])
    replaced = stop_criteria.replacement({"stopping_criteria": criteria})["stopping_criteria"]
    ids = torch.tensor([[3, 4, 1], [3, 4, 2]])
    assert not replaced(ids, None).any()
    criteria.append(EosTokenCriteria(2))
    assert replaced(ids, None).tolist() == [False, True]
    criteria.append(EosTokenCriteria(1))
    assert replaced(ids, None).all()


@pytest.mark.parametrize("kind", [StoppingCriteriaList, MaxLengthCriteria])
def test_criteria_that_are_replaced_during_a_call_are_called(kind, monkeypatch):
    replaced, ids = replaced_criteria(MaxLengthCriteria(9)), torch.zeros((2, 5), dtype=torch.int64)
    assert not replaced(ids, None).any()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", lambda self, input_ids, *_, **__: torch.ones(2, dtype=torch.bool))
        assert replaced(ids, None).all()
    assert not replaced(ids, None).any()


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


@pytest.mark.parametrize("on_host", [True, False])
def test_the_host_keeps_the_tokens_unless_a_criterion_may_change_them(on_host):
    """The criterion for the maximum length is called when this length is reached, for example by tokens plus drafts."""
    tokens, ids = HostTokens(), torch.tensor([[4, 5, 6]])
    tokens.of(ids)
    further = [] if on_host else [MaxTimeCriteria(600.0)]
    inner = replaced_criteria(MaxLengthCriteria(3), EosTokenCriteria(torch.tensor([9])), *further)
    criteria = stop_criteria._Criteria(inner, tokens)
    assert criteria(ids, None).tolist() == [True] and tokens.has(ids) is on_host
