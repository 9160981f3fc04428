"""The page of planted faults has one section per architecture, and its totals are the sums of the sections."""

from __future__ import annotations

import re

from tests.amdgcn import record_faults

FAULT = {"kernel": "norm", "kind": "another mask", "before": "v_a |v1|, v2", "after": "v_b v1, v2", "cases": 3}


def faults(*outcomes):
    return [{**FAULT, "detected": detected, "proof": proof} for detected, proof in outcomes]


def test_a_page_lists_detected_and_proven_faults():
    sections = {
        "gfx942": record_faults.section("gfx942", 1, faults(("Race", None), (None, "it is not read"), (None, None))),
        "gfx1100": record_faults.section("gfx1100", 2, faults(("wrong result", None))),
    }
    text = record_faults.page(sections)
    assert record_faults.totals(sections) == (4, 2, 1, 1)
    assert "4 planted, 2 detected, 1 change nothing, 1 not" in text and "66.7%" in text
    assert "| changes nothing: it is not read |" in text and "**not detected** by 3 cases" in text
    assert "`v_a \\|v1\\|, v2`" in text
    assert record_faults.sections_of(text).keys() == sections.keys()
    assert record_faults.page(record_faults.sections_of(text)) == text


def test_one_architecture_is_recorded_again(tmp_path, monkeypatch):
    page = tmp_path / "faults.md"
    old = {"gfx1100": record_faults.section("gfx1100", 1, faults((None, None)))}
    page.write_text(record_faults.page(old), encoding="utf-8")
    monkeypatch.setattr(record_faults, "PAGE", page)
    monkeypatch.setattr(record_faults, "plant", lambda arch, seed, count: faults(("Race", None)) * count)
    # Only 3 of 4 faults are detected, which is below the limit.
    assert record_faults.main(["gfx942", "--count", "3", "--seed", "5"]) == 1
    assert "## gfx942\n\n3 planted with seed 5, 3 detected" in page.read_text(encoding="utf-8")
    assert record_faults.main(["gfx1100", "--count", "2"]) == 0
    assert list(record_faults.sections_of(page.read_text(encoding="utf-8"))) == ["gfx942", "gfx1100"]


def test_proofs_by_hand_belong_to_listed_faults():
    page = record_faults.sections_of(record_faults.PAGE.read_text(encoding="utf-8"))
    for (arch, kernel, before, after), proof in record_faults.PROOFS.items():
        row = rf"\| {kernel} \| [^|]+ \| `{re.escape(before)}` \| `{re.escape(after)}` \| (.*) \|\n"
        assert f"changes nothing: {proof} (by hand)" in re.findall(row, page[arch]), (arch, kernel, before)


def test_a_proof_by_hand_counts(monkeypatch):
    key = ("gfx942", *(FAULT[name] for name in ("kernel", "before", "after")))
    monkeypatch.setattr(record_faults, "PROOFS", {key: "both are 0"})
    assert "0 detected, 2 change nothing, 1 not" in record_faults.section(
        "gfx942",
        1,
        [*faults((None, None), (None, "it is not read")), {**FAULT, "before": "v_c", "detected": None, "proof": None}],
    )
    assert "both are 0 (by hand)" in record_faults.section("gfx942", 1, faults((None, None)))
