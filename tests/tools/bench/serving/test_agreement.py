"""Texts must be equal in fp32.

In 16 bits, a fifth of the compared tokens may differ, or twice the share that batching changes with stock transformers,
whichever is more.
"""

from __future__ import annotations

import pytest

from hf_rocm.tools.bench.serving.agreement import Agreement, agreement, differences

# Four tokens each.
STOCK = ["abcd", "efgh"]


def compared(answers, batched=STOCK, dtype="bfloat16", stock=STOCK):
    return agreement(stock, answers, batched=batched, tokens=4, dtype=dtype)


def test_nothing_is_compared_after_a_first_difference():
    assert differences(STOCK, STOCK, 4) == 0
    # 3 tokens up to the first difference, then 4 equal ones.
    assert differences(STOCK, ["abXd", "efgh"], 4) == pytest.approx(1 / 7)
    assert differences(STOCK, ["Xbcd", "efXX"], 4) == pytest.approx(2 / 4)
    # one text has fewer characters, and the other more
    assert differences(STOCK, ["abc", "efghij"], 4) == pytest.approx(2 / 8)
    assert differences(STOCK, ["", ""], 4) == 1 and differences(["", ""], ["a", ""], 4) == pytest.approx(1 / 5)


def test_wrong_results_are_detected_in_answers_of_any_length_and_rounding_is_not():
    stock = ["abcdefghijklmnop"] * 10
    # From the eighth token on, the answers differ.
    rounded = ["abcdefgXXXXXXXXX"] * 10
    wrong = ["aXXXXXXXXXXXXXXX"] * 10
    for length in (4, 8, 16):
        texts = [[text[:length] for text in one] for one in (stock, rounded, wrong)]
        results = [agreement(texts[0], one, batched=texts[0], tokens=length, dtype="bfloat16") for one in texts]
        assert [one.wrong for one in results] == [False, False, True]


def test_in_fp32_every_answer_must_be_equal():
    assert not compared(STOCK, dtype="float32").wrong
    assert compared(["abcd", "efgX"], batched=["X", "X"], dtype="float32").wrong
    assert compared(["abcd", "efghij"], dtype="float32").wrong


@pytest.mark.parametrize(
    ("answers", "batched", "wrong"),
    [
        # 1 of 8 tokens.
        (["abcX", "efgh"], STOCK, False),
        # 1 of 5 tokens, which is the limit if stock's texts agree.
        (["abcd", "Xfgh"], STOCK, False),
        # 2 of 5 tokens.
        (["abcX", "Xfgh"], STOCK, True),
        # In stock transformers itself, 1 of 5 tokens differs.
        (["abcX", "Xfgh"], ["abcd", "Xfgh"], False),
        (["Xbcd", "Xfgh"], ["abcd", "Xfgh"], True),
    ],
)
def test_in_16_bits_the_limit_is_a_fifth_or_twice_the_share_that_batching_changes_in_stock(answers, batched, wrong):
    assert compared(answers, batched).wrong is wrong


def test_the_sentence_contains_the_tolerance_if_an_answer_differs():
    assert compared(STOCK).sentence == "parity: hf_rocm returned stock's text for all 2 greedy requests"
    sentence = compared(["abXd", "efgh"], ["abcX", "efgh"]).sentence
    assert "1 of 2" in sentence and "14 % of the compared tokens" in sentence
    assert "Allowed in bfloat16: 25 % (stock itself: 12 %" in sentence and "`hf-rocm verify`" in sentence


def test_an_agreement_is_unchanged_by_a_json_round_trip():
    result = compared(["abXd", "efgh"], dtype="float16")
    assert Agreement.from_dict(result.to_dict()) == result and result.to_dict()["allowed"] == 0.2
