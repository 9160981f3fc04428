"""For mkdocs: links to what the site doesn't hold (files beside docs/, folders of data) become plain text."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\((?:\.\./[^)]*|[\w/-]+/)\)", r"\1", markdown)
