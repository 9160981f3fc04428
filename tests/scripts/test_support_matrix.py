"""scripts/support-matrix writes exactly what was recorded."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.overlay.test_scripts import load

FEATURES = (
    "attention", "fused QKV", "fused gate/up", "activation", "norm", "add+norm", "rope", "MoE", "recorded",
)  # fmt: skip
NONE, FUSED_IN_CHECKPOINT = "the model has none", "fused in the checkpoint"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("support-matrix")


def row(name: str, cases: tuple[str, ...] = (), **marks: str) -> dict[str, object]:
    named = {feature: marks.get(feature.split()[-1].split("/")[0].split("+")[0], "yes") for feature in FEATURES}
    return {"overlay": f"transformers-4.53/{name}", "classes": {}, "support": named, "cases": list(cases or (name,))}


RECORDS = {
    "5.23.0": {
        "phi3": row("phi3", QKV=FUSED_IN_CHECKPOINT),
        "siglip": row("siglip", ("llava", "siglip"), gate=NONE, MoE=NONE),
        "whisper": row("whisper", QKV="stock: one of them has no bias"),
    },
    "4.53.3": {"phi3": row("phi3")},
}


def test_the_page_has_a_table_per_release_and_every_reason(script: ModuleType) -> None:
    page = script.page(RECORDS)
    assert "| phi3 | 4.53 | ● | ◐ |" in page and "| siglip | 4.53 | ● | ● | – |" in page
    assert page.index("## transformers 5.23.0") < page.index("## transformers 4.53.3")
    assert "- fused QKV: one of them has no bias: whisper" in page
    assert "Models that are served by the overlays of their parts: `llava` by siglip." in page


def test_a_model_is_served_in_full_only_if_all_three_parts_are_served(script: ModuleType) -> None:
    assert script.full(RECORDS["5.23.0"]["phi3"])
    assert not script.full(RECORDS["5.23.0"]["whisper"]) and not script.full(RECORDS["5.23.0"]["siglip"])
    assert script.full(row("mixtral", gate=NONE)), "its gates belong to the experts"
    assert not script.full(row("minimax", attention="stock: why"))
    assert "attention, QKV and gate/up are served in 1 of them" in script.page(RECORDS)


def test_the_readme_has_the_newest_release_and_the_number_of_the_others(script: ModuleType) -> None:
    text = f"before\n{script.BEGIN}old\n{script.END}\nafter\n"
    updated = script.readme(text, RECORDS)
    assert updated.startswith("before\n") and updated.endswith("\nafter\n") and "old" not in updated
    assert "3 modeling files in transformers 5.23.0" in updated and "1 in 4.53.3" in updated
    assert script.readme(updated, RECORDS) == updated
    assert script.readme("no place for it\n", RECORDS) == "no place for it\n"


def test_check_writes_nothing(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    page, readme = tmp_path / "page.md", tmp_path / "README.md"
    readme.write_text(f"{script.BEGIN}{script.END}\n")
    for name, value in {"ROOT": tmp_path, "PAGE": page, "README": readme}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "read", lambda: RECORDS)
    assert script.main(["--check"]) == 1 and not page.exists()
    assert script.main([]) == script.main(["--check"]) == 0
    assert script.main(["--nonsense"]) == 2
