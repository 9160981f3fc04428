"""mkdocs hooks: links to files outside the site become plain text, and tables and drawings fit narrow windows.

In a narrow window, a table with long text in its cells becomes a list of its rows. Other wide content gets a scrolling
box, so that the page never scrolls sideways.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# A text table has a cell with more characters than this after the first column.
LONG = 60
# If code in the first column has more characters than this, there is too little room for a second column.
WIDE_NAME = 24
# The largest number of columns of a text table.
FEW = 6
# The smallest number of columns of a table whose first column stays visible.
MANY = 4


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside docs/ and links to folders with their text."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./[^)]*|[\w/-]+/)\)", r"\1", markdown)


def on_page_content(html: str, page: Any = None, **_: Any) -> str:
    """Put tables and drawings into boxes with classes for the style sheet, and rename anchors that begin with a digit.

    The theme looks up anchors as CSS selectors, in which a digit is not allowed after the `#`.
    """
    for link in _links([] if page is None else page.toc):
        if link.id[:1].isdigit():
            link.id = f"section-{link.id}"
    html = re.sub(r'(<h\d id="|href="#)(?=\d)', r"\1section-", html)
    html = re.sub(r"<table>.*?</table>", lambda match: table(match[0]), html, flags=re.DOTALL)
    return re.sub(r'<p>(<img [^>]*src="[^"]*\.svg"[^>]*>)</p>', r'<div class="drawing">\1</div>', html)


def table(html: str) -> str:
    """Return the table in a box. In a text table, every cell after the first column gets the name of its column as an
    attribute. A header row without text is removed."""
    head = [_text(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", html, re.DOTALL)]
    if not any(head):
        html = re.sub(r"<thead>.*?</thead>\n?", "", html, flags=re.DOTALL)
    cells = [_text(cell) for cell in re.findall(r"</td>\s*<td[^>]*>(.*?)(?=</td>)", html, re.DOTALL)]
    names = re.findall(r"<tr>\s*<td[^>]*>\s*<code>(.*?)</code>", html)
    crowded = len(head) > 2 or max(map(len, names), default=0) > WIDE_NAME
    kind = ""
    if crowded and len(head) <= FEW and max(map(len, cells), default=0) > LONG:
        kind = " texts"
        html = re.sub(r"<tr>\n<td.*?</tr>", lambda row: _named(row[0], head), html, flags=re.DOTALL)
    elif len(head) >= MANY:
        kind = " columns"
    html = html.replace("<table>", '<table class="table table-striped table-hover">', 1)
    return f'<div class="scroll{kind}">{html}</div>'


def _named(row: str, head: list[str]) -> str:
    """Add the name of its column to every cell of a row except the first one, as the attribute `data-column`."""
    first, *others = row.split("<td")[1:]
    cells = [f' data-column="{name}"{cell}' if name else cell for name, cell in zip(head[1:], others, strict=True)]
    return "<td".join([row[: row.index("<td")], first, *cells])


def _text(html: str) -> str:
    """Return the text of a cell, without tags, with `"` escaped for an attribute."""
    return re.sub(r"<[^>]+>", "", html).replace('"', "&quot;").strip()


def _links(links: Any) -> Iterator[Any]:
    for link in links:
        yield link
        yield from _links(link.children)
