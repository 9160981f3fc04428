"""The documentation site: the changes that its hooks make to pages, and a navigation bar that fits on one line."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "scripts" / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = CONFIG[CONFIG.index("\nnav:\n") :]


@pytest.fixture(scope="module")
def hooks():
    specification = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "lib" / "site_hooks.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_tables_and_drawings_scroll_in_boxes(hooks):
    table = "<table>\n<tr><td>1</td></tr>\n</table>"
    drawing = '<img alt="a" src="performance/decode.svg" />'
    page = f"<p>before</p>{table}<p>{drawing}</p>{table}<p>after</p>"
    boxes = [f'<div class="scroll">{part}</div>' for part in (table, drawing, table)]
    assert hooks.on_page_content(page) == f"<p>before</p>{''.join(boxes)}<p>after</p>"
    assert ".scroll {\n    overflow-x: auto;" in (ROOT / "scripts/site/css/hf_rocm.css").read_text(encoding="utf-8")


def test_links_to_files_outside_the_site_become_text(hooks):
    page = "[a](../README.md), [records](support/), [b](weights.md), [c](https://example.org/)"
    assert hooks.on_page_markdown(page) == "a, records, [b](weights.md), [c](https://example.org/)"


def test_the_navigation_fits_on_one_line_and_has_every_page_once():
    menus = re.findall(r"^  - ([^:\n]+):$", NAVIGATION, re.M)
    assert 3 <= len(menus) <= 6 and sum(map(len, menus)) <= 45, menus
    listed = re.findall(r"^      - .+: ([\w/-]+\.md)$", NAVIGATION, re.M)
    assert sorted(listed) == sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    )
