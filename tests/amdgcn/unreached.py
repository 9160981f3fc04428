"""Which instructions of the compiled kernels no case has reached, by the line of the kernel that they come from.

    python -m tests.amdgcn.unreached REPORT ...

The reports are those of `pytest tests/triton --machine-code ARCH --machine-code-report REPORT`. What a launch cannot
reach beside what it does is explained, and counted apart.
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

OTHERS = frozenset({"_attn_fwd"})  # kernels that are not of hf_rocm: aiter's

_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"')
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_ENTRY = re.compile(r"(s_load_dword\w*|s_waitcnt|s_nop)\b.*|s_branch \S+")
_INSTRUCTION = re.compile(r"(?:[.\w$]+:\s*)?(?:s|v|ds|global|buffer|flat|scratch)_\w+\b(?!:)")


@dataclass(frozen=True)
class Share:
    """How much of a kernel's compiled forms on one architecture was reached.

    explained: instructions that were not reached for a reason that holds for every launch. places: of all others.
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
    """The line of Python that every instruction comes from: `decode.py:120`, in the order of the instructions."""
    files, here, out = dict[str, str](), "", list[str]()
    for raw in text[: text.index(".amdhsa_kernel")].splitlines():
        line = raw.split(";", 1)[0].strip()
        if match := _FILE.match(line):
            files[match[1]] = Path(match[2]).name
        elif match := _LOCATION.match(line):
            if match[2] != "0":  # line 0: code that belongs to none, in the middle of another
                here = f"{files.get(match[1], '?')}:{match[2]}"
        elif _INSTRUCTION.match(line):
            out.append(here)
    return out


def other_entry(instructions: Sequence[str], entry: int) -> range:
    """The instructions of the entry that a launch with preloaded arguments skips: they load the arguments.

    entry: where such a launch starts, or 0. Nothing if there are other instructions before it.
    """
    first = instructions[:entry]
    return range(entry if all(map(_ENTRY.fullmatch, first)) and any("branch" in each for each in first) else 0)


def shares(arch: str, forms: Iterable[Mapping[str, Any]]) -> Iterator[Share]:
    """One for every kernel. forms: as `record.Executed` has them."""
    kernels: dict[str, list[Mapping[str, Any]]] = {}
    for form in forms:
        kernels.setdefault(form["kernel"], []).append(form)
    for kernel, its in sorted(kernels.items()):
        places = Counter[str]()
        total = reached = explained = 0
        for form in its:
            seen, lines = set(form["reached"]), form["lines"]
            skipped = set(other_entry(form["instructions"], form["entry"])) - seen
            total, reached, explained = total + len(lines), reached + len(seen), explained + len(skipped)
            places.update(line for index, line in enumerate(lines) if index not in seen | skipped)
        yield Share(arch, kernel, len(its), total, reached, explained, places)


def missed(shares: Sequence[Share]) -> float:
    """The share of the instructions of all these kernels that was not reached without an explanation."""
    return sum(each.places.total() for each in shares) / max(1, sum(each.instructions for each in shares))


def table(shares: Iterable[Share]) -> str:
    """Markdown, a row for every share."""
    rows = ["| GPU | Kernel | Forms | Instructions | Not reached | Explained | Where |", "|---" * 7 + "|"]
    for each in shares:
        where = ", ".join(f"{place} ({count})" for place, count in each.places.most_common(4))
        numbers = f"{each.forms} | {each.instructions} | {each.missed:.1%} | {each.explained}"
        rows.append(f"| {each.arch} | `{each.kernel}` | {numbers} | {where} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    every: list[Share] = []
    for path in arguments:
        report = json.loads(Path(path).read_text())
        every += shares(report["arch"], report["forms"].values())
    others = [each for each in every if each.kernel in OTHERS]
    every = [each for each in every if each not in others]
    print(table(every))
    total, explained = (sum(getattr(each, name) for each in every) for name in ("instructions", "explained"))
    count = sum(each.places.total() for each in every)
    print(f"\n{count} of {total} instructions were not reached, {missed(every):.1%}, and {explained} are explained.")
    if others:
        print(f"\nOf others' kernels, which are not counted:\n\n{table(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
