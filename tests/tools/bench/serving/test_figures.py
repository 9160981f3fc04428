"""Traffic figures, compared with manual calculations, and their table."""

from __future__ import annotations

import pytest

from hf_rocm.tools.bench.clock import percentiles
from hf_rocm.tools.bench.serving.client import Response
from hf_rocm.tools.bench.serving.figures import by_case, figures, notes, table
from hf_rocm.tools.bench.serving.traffic import Load, Traffic

LOAD = Load(2, None, 5, 4, 9, 3)

# Two streamed responses of 3 tokens, one whole response, and two failures: 9 tokens in 2 seconds.
RESPONSES = (
    Response(0.0, 0.9, "a b c", (0.1, 0.2, 0.4), prompt=4, tokens=3),
    # Two tokens arrived in one chunk.
    Response(0.5, 2.0, "a b c", (0.8, 1.8), prompt=9, tokens=3),
    Response(1.0, 1.5, "a b c", (), prompt=5, tokens=3),
    Response(1.0, 1.2, "a", (1.1,), prompt=5, tokens=1, error="wrong length", detail="1 of 3 tokens"),
    Response(1.0, 1.1, error="HTTP 500", detail="no memory"),
)


def case_of(side, responses=RESPONSES, seconds=2.0, unsent=0, load=LOAD):
    return figures(load, side, Traffic(responses, seconds, unsent))


def test_percentiles_are_interpolated():
    assert percentiles([]) is None
    assert percentiles([0.25]) == pytest.approx((250, 250, 250))
    # for 0 to 100 ms in steps of 1 ms, the n-th percentile is n ms
    assert percentiles([step / 1000 for step in range(100, -1, -1)]) == pytest.approx((50, 95, 99))
    # for four values, the 50th percentile is halfway between the second and the third; the 95th and the 99th are 0.85
    # and 0.97 of the way from the third to the last
    assert percentiles([0.4, 0.1, 0.2, 0.3]) == pytest.approx((250, 385, 397))


def test_figures_are_those_computed_by_hand():
    case = case_of("stock")
    assert case["answered"] == 3 and case["tokens"] == 9 and case["prompt_tokens"] == 18
    assert case["rate"] == pytest.approx(4.5)
    assert case["streamed_tokens"] == 6 and case["pieces"] == 5
    assert case["errors"] == {
        "wrong length": {"count": 1, "example": "1 of 3 tokens"},
        "HTTP 500": {"count": 1, "example": "no memory"},
    }
    first, between, whole = (case["times"][name] for name in ("first", "between", "whole"))
    # The median of 100 and 300 ms.
    assert first["median"] == pytest.approx(200)
    assert first["p95"] == pytest.approx(290) and first["p99"] == pytest.approx(298)
    # The median of 100, 200 and 1000 ms.
    assert between["median"] == pytest.approx(200)
    assert between["p95"] == pytest.approx(920) and between["p99"] == pytest.approx(984)
    # The median of 900, 1500 and 500 ms.
    assert whole["median"] == pytest.approx(900)


def test_an_abandoned_stream_is_counted_and_changes_nothing_else():
    case = case_of("stock", (*RESPONSES, Response(0.0, 0.5, "a", (0.3,), left=True)))
    assert case.pop("left") == 1 and case == {name: value for name, value in case_of("stock").items() if name != "left"}
    (line,) = [
        line for line in notes([case_of("stock", (*RESPONSES, Response(0.0, 0.5, left=True)))]) if "abandoned" in line
    ]
    assert line.startswith("stock: 1 stream ")


def test_without_an_answer_there_are_no_times():
    case = case_of("stock", RESPONSES[3:])
    assert case["times"] == {"first": None, "between": None, "whole": None} and case["rate"] == 0
    header, rows = table([case, case_of("hf_rocm")])
    assert header == ("", "stock", "hf_rocm", "× stock")
    assert [row[-1] for row in rows] == [""] * len(rows)


def test_the_table_compares_the_sides():
    prepared = tuple(
        Response(0.0, response.ended / 2, "x", tuple(seconds / 2 for seconds in response.pieces), 4, 3)
        for response in RESPONSES[:1]
    )
    header, rows = table([case_of("stock", RESPONSES[:1], seconds=0.9), case_of("hf_rocm", prepared, seconds=0.3)])
    assert header == ("", "stock", "hf_rocm", "× stock")
    cells = {row[0]: row[1:] for row in rows}
    assert cells["tokens per second"] == ("3.3", "10.0", "3.00")
    assert cells["time to first token, ms"] == ("100 / 100 / 100", "50.0 / 50.0 / 50.0", "2.00")
    assert cells["time to complete answer, ms"][-1] == "2.00"
    assert cells["answers"] == ("1", "1", "") and cells["errors"] == ("0", "0", "")


def test_one_side_has_no_comparison():
    header, rows = table([case_of("stock")])
    assert header == ("", "stock") and all(len(row) == 2 for row in rows)


def test_whole_answers_have_no_time_to_a_first_token():
    _, rows = table([case_of("stock", RESPONSES[2:3])])
    assert [row[0] for row in rows] == ["tokens per second", "time to complete answer, ms", "answers", "errors"]


def test_notes_list_errors_by_kind_and_unsent_requests():
    lines = notes([case_of("stock", unsent=7)])
    assert "stock: 1 × HTTP 500, first: no memory" in lines
    assert "stock: 7 requests were not sent within 120 s" in lines
    assert any("5 of 6 (stock)" in line for line in lines)
    assert notes([case_of("stock", RESPONSES[:1])]) == []


def test_cases_are_grouped_by_load_with_stock_first():
    other = Load(None, 2.0, 5, 4, 9, 3)
    cases = [case_of("hf_rocm"), case_of("hf_rocm", load=other), case_of("stock"), case_of("stock", load=other)]
    groups = by_case(cases)
    assert [[(case["title"], case["side"]) for case in group] for group in groups] == [
        [(LOAD.title, "stock"), (LOAD.title, "hf_rocm")],
        [(other.title, "stock"), (other.title, "hf_rocm")],
    ]
