"""Generated pages and diagrams: docstrings as Markdown, and diagrams whose text fits into their boxes."""

from __future__ import annotations

import re
import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in [name for name in sys.modules if name == "lib" or name.startswith("lib.")]:
        monkeypatch.delitem(sys.modules, name)


def test_paragraphs_of_a_docstring_end_where_its_author_ended_a_line():
    from lib.reference import prose

    filled = (
        "A sentence that fills the line up to its end, so that the next word would not have fit into it, " + "x" * 18
    )
    text = f"Do it.\n\nmode, tf32: a text.\n{filled}.\nIt goes on. other: no parameter.\nEnds\nhere."
    assert list(prose(text, {"mode", "tf32"})) == [
        "Do it.\n",
        "`mode`, `tf32`: a text.\n",
        f"{filled}. It goes on. other: no parameter.\n",
        "Ends here.\n",
    ]


def test_a_parameter_may_follow_a_full_line():
    from lib.reference import prose

    full = f"mode: {'x' * 109}."
    assert [part[:7] for part in prose(f"{full}\nscale: 1.", {"mode", "scale"})] == ["`mode`:", "`scale`"]


def test_characters_of_shapes_and_formulas_are_not_markdown():
    from lib.reference import prose

    (text,) = prose("x: [B | 1, S_q], 2 * _y * <z>, `a*b[0]`; w: [N](none).", {"x", "w"})
    assert text == r"`x`: \[B | 1, S_q\], 2 \* \_y \* \<z>, `a*b[0]`; `w`: \[N\](none)." + "\n"


def test_indented_lines_stay_as_they_are():
    from lib.reference import prose

    assert list(prose("One.\n\nlist:\n    a\n    b")) == ["One.\n", "```text\nlist:\n    a\n    b\n```\n"]


@pytest.mark.parametrize("name", ["INSTALL", "RUN"])
def test_the_text_of_a_diagram_fits_and_its_boxes_do_not_overlap(name):
    from lib import diagrams

    parts = getattr(diagrams, name)
    boxes = [part for part in parts if isinstance(part, diagrams.Box)]
    for box in boxes:
        widest = max([0.6 * diagrams.TITLE * len(box.title), *(0.55 * diagrams.TEXT * len(line) for line in box.lines)])
        assert widest <= box.width - 2, box.title
        assert diagrams.LINE * (1 + len(box.lines)) <= box.height - 8, box.title
    for one, two in combinations(boxes, 2):
        beside = one.x + one.width <= two.x or two.x + two.width <= one.x
        assert beside or one.y + one.height <= two.y or two.y + two.height <= one.y, (one.title, two.title)
    root = ElementTree.fromstring(diagrams.svg("a < b", parts))
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 480, "too wide to be readable in a column of 360 pixels"
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}" and root.get("aria-label") == "a < b"


def test_the_readme_and_the_page_of_variables_agree_on_models_that_are_not_served():
    from lib.reference import _environment

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for words in (" ".join(text.split()) for text in (_environment(), readme)):
        assert re.search(r"Where the ROCm path is off[^.]*, only `HF_ROCM_FORCE` affects models\.", words)
