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


CSS = (ROOT / "scripts" / "site" / "css" / "hf_rocm.css").read_text(encoding="utf-8")
HEAD, END = '<table class="table table-striped table-hover">', "</table></div>"


def rows(*lines: str) -> str:
    """A table as mkdocs writes it. The first line is the header row, and cells are separated by `|`."""
    head, *body = (line.split("|") for line in lines)
    cells = ["<tr>\n" + "".join(f"<td>{cell}</td>\n" for cell in line) + "</tr>\n" for line in body]
    names = "".join(f"<th>{name}</th>\n" for name in head)
    return f"<table>\n<thead>\n<tr>\n{names}</tr>\n</thead>\n<tbody>\n{''.join(cells)}</tbody>\n</table>"


def test_tables_and_drawings_are_in_boxes(hooks):
    table = rows("a|b", "1|2")
    drawing = '<img alt="a" src="performance/decode.svg" />'
    box = f'<div class="scroll">{table.replace("<table>", HEAD)}</div>'
    page = f"<p>before</p>{table}<p>{drawing}</p>{table}<p>after</p>"
    assert hooks.on_page_content(page) == f'<p>before</p>{box}<div class="drawing">{drawing}</div>{box}<p>after</p>'
    assert ".scroll {\n    overflow-x: auto;" in CSS and ".drawing img {" in CSS


def test_a_table_of_texts_names_the_column_in_every_cell(hooks):
    shown = hooks.table(rows('name|kind of "use"|', f"<code>x</code>|<em>y</em>|{61 * 'z'}", "1|2|"))
    assert shown.startswith(f'<div class="scroll texts">{HEAD}') and shown.endswith(END)
    assert "<td><code>x</code></td>" in shown and "<td>1</td>" in shown
    assert shown.count('<td data-column="kind of &quot;use&quot;">') == 2
    assert f"<td>{61 * 'z'}</td>" in shown, "a column without a name"
    for rule in (".scroll.texts td[data-column]::before", ".scroll.texts thead"):
        assert rule in CSS


def test_tables_of_two_columns_stay_tables_unless_the_first_one_is_wide(hooks):
    text = 61 * "z"
    assert hooks.table(rows("|", f"x|{text}")).startswith('<div class="scroll">')
    assert hooks.table(rows("|", f"<code>--long-option/--no-long-option</code>|{text}")).startswith(
        '<div class="scroll texts">'
    )


def test_the_first_column_of_a_table_of_figures_stays_visible(hooks):
    assert hooks.table(rows("|a|b|c", f"{61 * 'x'}|1|2|3")).startswith('<div class="scroll columns">')
    assert re.search(r"\.scroll\.columns td:first-child \{\n    position: sticky;", CSS)


def test_an_empty_head_is_removed(hooks):
    assert "<thead>" not in hooks.table(rows("|", "1|2")) and "<thead>" in hooks.table(rows("a|", "1|2"))


def test_anchors_do_not_begin_with_a_digit(hooks):
    """The theme's script uses anchors as CSS selectors, and an invalid selector stops the script."""

    class Link:
        def __init__(self, id, *children):
            self.id, self.children = id, children

    page = type("Page", (), {"toc": [Link("8-bit-weights", Link("4-bit"), Link("x-1"))]})
    html = '<h1 id="8-bit-weights">8</h1><h2 id="x-1">x</h2><a href="#8-bit-weights">8</a>'
    assert hooks.on_page_content(html, page=page) == (
        '<h1 id="section-8-bit-weights">8</h1><h2 id="x-1">x</h2><a href="#section-8-bit-weights">8</a>'
    )
    (link,) = page.toc
    assert [link.id, *(child.id for child in link.children)] == ["section-8-bit-weights", "section-4-bit", "x-1"]


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
