"""Texts must be equal in fp32.

In 16 bits, half of the text may differ, or twice the share that batching changes in stock if that is more.
"""

from __future__ import annotations

import pytest

from hf_rocm.tools.bench.serving.agreement import Agreement, agreement, lost

STOCK = ["abcd", "efgh"]


def test_the_lost_share_is_the_text_from_the_first_difference_on():
    assert lost(STOCK, STOCK) == 0
    assert lost(STOCK, ["abXd", "efgh"]) == pytest.approx(2 / 8)
    # the last character of the first text is lost, and nothing of the second text
    assert lost(STOCK, ["abc", "efghij"]) == pytest.approx(1 / 8)
    assert lost(STOCK, ["", ""]) == 1 and lost(["", ""], ["a", ""]) == 0


def test_in_fp32_every_answer_must_be_equal():
    assert not agreement(STOCK, STOCK, batched=STOCK, dtype="float32").wrong
    assert agreement(STOCK, ["abcd", "efgX"], batched=["X", "X"], dtype="float32").wrong
    assert agreement(STOCK, ["abcd", "efghij"], batched=STOCK, dtype="float32").wrong


@pytest.mark.parametrize(
    ("answers", "batched", "wrong"),
    [
        (["abcX", "efgh"], STOCK, False),  # loses 1 of 8 characters
        (["abcd", "Xfgh"], STOCK, False),  # loses 4 of 8, the limit if stock's texts agree
        (["abcX", "Xfgh"], STOCK, True),  # loses 5 of 8
        (["abcX", "Xfgh"], ["abXd", "eXgh"], False),  # stock itself also loses 5 of 8
        (["Xbcd", "Xfgh"], STOCK, True),
        (["Xbcd", "efXh"], ["abcd", "eXgh"], False),  # loses 6 of 8, twice as many as stock
        (["Xbcd", "eXgh"], ["abcd", "eXgh"], True),  # loses 7 of 8
    ],
)
def test_in_16_bits_the_limit_is_twice_the_share_that_stock_loses_by_batching(answers, batched, wrong):
    assert agreement(STOCK, answers, batched=batched, dtype="bfloat16").wrong is wrong


def test_the_sentence_has_the_tolerance_where_it_was_needed():
    assert agreement(STOCK, STOCK, batched=STOCK, dtype="bfloat16").sentence == (
        "parity: hf_rocm returned stock's text for all 2 greedy requests"
    )
    sentence = agreement(STOCK, ["abXd", "efgh"], batched=["abcX", "efgh"], dtype="bfloat16").sentence
    assert "1 of 2" in sentence and "25 % of the text" in sentence and "Allowed in bfloat16: 50 %" in sentence
    assert "answers differ by 12 %" in sentence and "`hf-rocm verify`" in sentence


def test_an_agreement_is_unchanged_by_a_json_round_trip():
    result = agreement(STOCK, ["abXd", "efgh"], batched=STOCK, dtype="float16")
    assert Agreement.from_dict(result.to_dict()) == result and result.to_dict()["allowed"] == 0.5
