"""mkdocs hooks: links to files outside the site become plain text, and wide content gets a scrolling box."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside docs/ and links to folders with their text."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./[^)]*|[\w/-]+/)\)", r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Wrap tables, and SVG images that are paragraphs, in scrolling boxes, so that the page never scrolls sideways."""
    html = re.sub(r"<table>.*?</table>", r'<div class="scroll">\g<0></div>', html, flags=re.DOTALL)
    return re.sub(r'<p>(<img [^>]*src="[^"]*\.svg"[^>]*>)</p>', r'<div class="scroll">\1</div>', html)
