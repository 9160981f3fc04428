"""Print how many instructions of every compiled kernel no case has reached, and the source lines with most of them.

    python -m tests.amdgcn.unreached REPORT ...

The reports are those of `pytest tests/triton --machine-code ARCH --machine-code-report REPORT`. Instructions that were
not reached because all launches had preloaded arguments are counted separately, as "explained".
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A kernel of aiter, which is listed separately.
OTHERS = frozenset({"_attn_fwd"})

_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"')
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_ENTRY = re.compile(r"(s_load_dword\w*|s_waitcnt|s_nop)\b.*|s_branch \S+")
_INSTRUCTION = re.compile(r"(?:[.\w$]+:\s*)?(?:s|v|ds|global|buffer|flat|scratch)_\w+\b(?!:)")


@dataclass(frozen=True)
class Share:
    """How many instructions of a kernel's compiled variants on one architecture were reached.

    explained: the number of instructions that were not reached because all launches had preloaded arguments.
    places: the source lines of all other instructions that were not reached.
    """

    arch: str
    kernel: str
    forms: int
    instructions: int
    reached: int
    explained: int
    places: Counter[str]

    @property
    def missed(self) -> float:
        return (self.instructions - self.reached - self.explained) / self.instructions


def source_lines(text: str) -> list[str]:
    """The Python line of every instruction, in order, such as `decode.py:120`."""
    files, current, out = dict[str, str](), "", list[str]()
    for raw in text[: text.index(".amdhsa_kernel")].splitlines():
        line = raw.split(";", 1)[0].strip()
        if match := _FILE.match(line):
            files[match[1]] = Path(match[2]).name
        elif match := _LOCATION.match(line):
            # Line 0 means code without a source line, which is counted with the line before it.
            if match[2] != "0":
                current = f"{files.get(match[1], '?')}:{match[2]}"
        elif _INSTRUCTION.match(line):
            out.append(current)
    return out


def other_entry(instructions: Sequence[str], entry: int) -> range:
    """The range of instructions that load the arguments and that a launch with preloaded arguments skips.

    entry: the index of the instruction at which such a launch starts, or 0. The range is empty if there are other
    instructions before `entry`, or no branch.
    """
    first = instructions[:entry]
    return range(entry if all(map(_ENTRY.fullmatch, first)) and any("branch" in text for text in first) else 0)


def shares(arch: str, forms: Iterable[Mapping[str, Any]]) -> Iterator[Share]:
    """Yield one `Share` for every kernel. forms: the fields of `record.Executed`."""
    kernels: dict[str, list[Mapping[str, Any]]] = {}
    for form in forms:
        kernels.setdefault(form["kernel"], []).append(form)
    for kernel, variants in sorted(kernels.items()):
        places = Counter[str]()
        total = reached = explained = 0
        for form in variants:
            executed, lines = set(form["reached"]), form["lines"]
            skipped = set(other_entry(form["instructions"], form["entry"])) - executed
            total, reached, explained = total + len(lines), reached + len(executed), explained + len(skipped)
            places.update(line for index, line in enumerate(lines) if index not in executed | skipped)
        yield Share(arch, kernel, len(variants), total, reached, explained, places)


def missed(shares: Sequence[Share]) -> float:
    """The share of the instructions of all these kernels that were not reached and have no explanation."""
    return sum(share.places.total() for share in shares) / max(1, sum(share.instructions for share in shares))


def table(shares: Iterable[Share]) -> str:
    """Format the shares as a Markdown table, one row per share."""
    rows = ["| GPU | Kernel | Variants | Instructions | Not reached | Explained | Where |", "|---" * 7 + "|"]
    for share in shares:
        where = ", ".join(f"{place} ({count})" for place, count in share.places.most_common(4))
        numbers = f"{share.forms} | {share.instructions} | {share.missed:.1%} | {share.explained}"
        rows.append(f"| {share.arch} | `{share.kernel}` | {numbers} | {where} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    counted: list[Share] = []
    for path in arguments:
        report = json.loads(Path(path).read_text())
        counted += shares(report["arch"], report["forms"].values())
    others = [share for share in counted if share.kernel in OTHERS]
    counted = [share for share in counted if share not in others]
    print(table(counted))
    total, explained = (sum(getattr(share, name) for share in counted) for name in ("instructions", "explained"))
    count = sum(share.places.total() for share in counted)
    summary = f"{count} of {total} instructions ({missed(counted):.1%})"
    print(f"\n{summary} were not reached; {explained} more were not reached, but are explained.")
    if others:
        print(f"\nKernels of other projects, which are not counted:\n\n{table(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
