"""Draw the diagrams of docs/how-it-works.md: boxes, arrows and notes as data, narrow enough to be read on a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

IMAGES = Path("docs/images")
# Space around the diagram; distance between baselines.
MARGIN, LINE = 16, 17
# Font sizes.
TITLE, TEXT = 14, 12.5

# kind → (fill, outline)
COLOURS = {
    "transformers": ("#f4f4f4", "#888888"),
    "hf_rocm": ("#e8f0fb", "#5b84c4"),
    "result": ("#e9f5ea", "#5a9a5f"),
    "refusal": ("#fbe9e7", "#d0705e"),
}
INK, FAINT = "#1f2933", "#444444"


class Box(NamedTuple):
    """A box with a bold title and lines of text below it."""

    kind: str
    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()


class Arrow(NamedTuple):
    """An arrow from (x, y) to (to_x, to_y). label: text that starts at (label_x, label_y)."""

    x: int
    y: int
    to_x: int
    to_y: int
    label: str = ""
    label_x: int = 0
    label_y: int = 0


class Note(NamedTuple):
    """Lines of text; (x, y) is the start of the first baseline."""

    x: int
    y: int
    lines: tuple[str, ...]


Part = Box | Arrow | Note

INSTALL: tuple[Part, ...] = (
    Box("hf_rocm", 16, 16, 190, 58, "overlays/", ("one Python file per model",)),
    Box("transformers", 266, 16, 190, 58, "transformers’ file", ("modeling_llama.py",)),
    Arrow(111, 74, 111, 116),
    Arrow(300, 74, 178, 116),
    Box(
        "transformers",
        16,
        118,
        188,
        76,
        "compare by content",
        ("the file’s hash, or every", "definition the overlay uses"),
    ),
    Arrow(204, 156, 264, 156, "differs", 212, 149),
    Box(
        "refusal",
        266,
        110,
        190,
        94,
        "refused",
        ("expected content, found", "content, next step;", "nothing is written"),
    ),
    Arrow(111, 194, 111, 258, "equal", 119, 230),
    Arrow(178, 194, 320, 258, "equal, no file written", 270, 230),
    Box(
        "result",
        16,
        260,
        238,
        96,
        "stock bytes, unchanged",
        ("—— begin marker ——", "its forwards, set on stock classes", "—— end marker ——"),
    ),
    Box("hf_rocm", 272, 260, 184, 78, "in memory instead", ("from_pretrained, activate:", "the same text")),
    Arrow(134, 356, 134, 400),
    Box("transformers", 16, 402, 238, 76, "uninstall", ("block removed,", "every byte restored")),
)

RUN: tuple[Part, ...] = (
    Box("transformers", 16, 16, 186, 76, "generate(…)", ("or model(…):", "your code, unchanged")),
    Arrow(202, 54, 252, 54),
    Box("hf_rocm", 254, 16, 202, 76, "forward", ("set on the stock class:", "hf_rocm's or stock, 0.3 µs")),
    Arrow(290, 92, 172, 132, "stock", 196, 106),
    Arrow(370, 92, 370, 226, "hf_rocm", 378, 164),
    Box("transformers", 16, 134, 186, 58, "stock forward", ("no ROCm, CPU, your hooks",)),
    Box("transformers", 16, 228, 186, 76, "fused weights", ("one matrix; pointers", "checked at every call")),
    Arrow(202, 266, 252, 266),
    Box("hf_rocm", 254, 228, 202, 76, "operation", ("attention, linear,", "norm, rope, …")),
    Arrow(290, 304, 192, 344),
    Arrow(370, 304, 370, 344),
    Box("transformers", 16, 346, 186, 76, "explain(model)", ("every choice, and why", "no faster one is used")),
    Box("result", 254, 346, 202, 56, "aiter", ("AMD’s kernels",)),
    Arrow(355, 402, 355, 426),
    Box("result", 254, 428, 202, 56, "triton", ("hf_rocm's, portable",)),
    Arrow(355, 484, 355, 508),
    Box("result", 254, 510, 202, 56, "torch", ("SDPA, BLAS libraries",)),
    Arrow(355, 566, 355, 590),
    Box("result", 254, 592, 202, 56, "eager", ("the definition",)),
    Note(
        16,
        466,
        (
            "A call is served by the first",
            "tier that accepts it and whose",
            "result was checked on this",
            "machine.",
            "",
            "A refusal has a reason, and the",
            "next tier is tried; a kernel",
            "that fails raises an error.",
        ),
    ),
)


def pages(root: Path) -> dict[Path, str]:
    """The files of the diagrams and their texts."""
    return {
        root / IMAGES / "install-path.svg": svg("How an overlay is installed and removed", INSTALL),
        root / IMAGES / "run-path.svg": svg("How a call reaches a kernel", RUN),
    }


def svg(title: str, parts: Sequence[Part]) -> str:
    """Return the diagram as an SVG document."""
    boxes = [part for part in parts if isinstance(part, Box)]
    width = max(box.x + box.width for box in boxes) + MARGIN
    height = max(box.y + box.height for box in boxes) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="{TEXT}">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 10 5 0 10z" fill="{FAINT}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        *(element for part in parts for element in _elements(part)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _elements(part: Part) -> Iterator[str]:
    if isinstance(part, Box):
        fill, outline = COLOURS[part.kind]
        yield (
            f'<rect x="{part.x}" y="{part.y}" width="{part.width}" height="{part.height}" rx="6" '
            f'fill="{fill}" stroke="{outline}"/>'
        )
        centre = part.x + part.width / 2
        y = part.y + part.height / 2 - LINE * len(part.lines) / 2 + 5
        yield (
            f'<text x="{centre:g}" y="{y:g}" text-anchor="middle" font-size="{TITLE}" font-weight="600" '
            f'fill="{INK}">{escape(part.title)}</text>'
        )
        for number, line in enumerate(part.lines, 1):
            yield (
                f'<text x="{centre:g}" y="{y + number * LINE:g}" text-anchor="middle" '
                f'fill="{FAINT}">{escape(line)}</text>'
            )
    elif isinstance(part, Arrow):
        yield (
            f'<path d="M{part.x} {part.y} L{part.to_x} {part.to_y}" stroke="{FAINT}" fill="none" '
            'marker-end="url(#tip)"/>'
        )
        if part.label:
            yield f'<text x="{part.label_x}" y="{part.label_y}" fill="{FAINT}">{escape(part.label)}</text>'
    else:
        for number, line in enumerate(part.lines):
            if line:
                yield f'<text x="{part.x}" y="{part.y + number * LINE}" fill="{FAINT}">{escape(line)}</text>'
