"""Comments stand above their lines. Trailing ones only describe shapes and units, or label entries."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hf_rocm", "overlays", "scripts", "tests")

DIRECTIVE = re.compile(r"noqa|type: ignore|fmt: |mypy: |pragma: ")
UNIT = re.compile(r"(in )?(bytes|characters|lines|seconds|tokens)")
SHAPE = re.compile(r"\[.*|\([A-Z0-9].*|(([A-Z](\w{0,2}|_\w+)|\d+)[ ,×/+·-]*)+([.;:(].*)?|\w+ [<=>≤≥]+ \w+(, .*)?")
# Maximum number of words in a comment on a list entry or an argument of a call.
LABEL = 3


@pytest.mark.parametrize("folder", FOLDERS)
def test_trailing_comments_describe(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    wrong = [f"{path.relative_to(ROOT)}:{row}: {text}" for path in files for row, text in trailing(path.read_text())]
    assert files and not wrong, "write these comments above their lines"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("x = 1  # because\n", [1]),
        ("x = 1  # seconds\ny = z  # [B, S, D]\n", []),
        ("def f(\n    x,  # a long description of this parameter\n    y,  # [B, S]\n):\n    return x  # why\n", [2, 5]),
        ("class A:\n    x: int = 0  # what this field means, in words\n    y: int = 0  # tokens\n", [2]),
        ("x = [\n    1,  # Qwen3\n    2,  # a reason that takes more words\n]\n", [3]),
        ('x = "# text"\n# above\ny = 1  # noqa: F841\n', []),
    ],
)
def test_the_rule(text, rows):
    assert [row for row, _ in trailing(text)] == rows


def trailing(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of every trailing comment that should be above its line."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        code = token.line[: token.start[1]].strip() if token.type == tokenize.COMMENT else ""
        comment = token.string.lstrip("# ")
        if not code or DIRECTIVE.match(comment):
            continue
        label = depth > 0 and code.endswith(",") and len(comment.split()) <= LABEL
        if not (label or UNIT.fullmatch(comment) or SHAPE.fullmatch(comment)):
            yield token.start[0], comment
