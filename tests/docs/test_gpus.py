"""docs/gpus.md lists the architectures and tiers of the code, and docs/aiter.md names the newest checked aiter."""

from __future__ import annotations

from pathlib import Path

from hf_rocm.architectures import KNOWN, NEWEST_AITER, tiers

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_architectures_is_current():
    expected = []
    for gfx, architecture in KNOWN.items():
        memory = "the host's" if architecture.integrated else "its own"
        tier = tiers(gfx)
        expected.append(
            f"| {gfx} | {architecture.family} | {architecture.cards} | {memory} | {tier['aiter']} | {tier['triton']} |"
        )
    lines = (DOCS / "gpus.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| gfx")] == expected


def test_the_page_on_aiter_names_its_newest_checked_release():
    assert f"| {NEWEST_AITER} (the main branch" in (DOCS / "aiter.md").read_text(encoding="utf-8")
