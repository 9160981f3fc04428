"""The pages on port-check: the example runs as pasted, the tables match the rules, and the totals in the review
are correct.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_rocm.cli import main
from hf_rocm.tools.porting.libraries import LIBRARIES
from hf_rocm.tools.porting.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_example_prints_the_output_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, output = re.findall(r"```text\n(.*?)```", section("Find it"), re.DOTALL)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["port-check", "train.py"]) == 1
    assert capsys.readouterr().out == output


def test_every_rule_is_in_the_table() -> None:
    rows = [line.split("|")[1] for line in section("Rules").splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(names) == sorted({rule.name for rule in RULES})


def test_every_library_of_the_table_has_a_rule() -> None:
    rows = [line.split("|")[1:3] for line in section("Libraries").splitlines() if line.startswith("| ")][1:]
    covered = " ".join(
        f"{library.cuda} {' '.join(library.packages)} {' '.join(library.headers)}" for library in LIBRARIES
    )
    for name in re.findall(r"[\w.+-]+(?: groups)?", ", ".join(cuda for cuda, _ in rows)):
        assert name.lower() in covered.lower(), name


def test_the_sums_of_the_review_are_correct() -> None:
    """The columns of the review's first table are project, kind, commit, files, findings, judged and wrong."""
    text = (ROOT / "docs" / "port-check-review.md").read_text(encoding="utf-8")
    table = text.split("## After the rules were changed\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    *projects, total = rows[1:]
    assert len(projects) >= 8
    for column in (3, 4, 5, 6):
        assert sum(int(row[column]) for row in projects) == int(total[column].split()[0])
    judged, wrong = int(total[5]), int(total[6].split()[0])
    assert f"{100 * (judged - wrong) / judged:.1f} % right" in total[6]
    assert all(int(row[5]) >= min(25, int(row[4])) for row in projects)
