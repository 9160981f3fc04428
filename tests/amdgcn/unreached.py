"""List the instructions of compiled kernels that no case has reached, by source line.

    python -m tests.amdgcn.unreached REPORT ...

The reports are those of `pytest tests/triton --machine-code ARCH --machine-code-report REPORT`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"')
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_INSTRUCTION = re.compile(r"(?:[.\w$]+:\s*)?(?:s|v|ds|global|buffer|flat|scratch)_\w+\b(?!:)")


@dataclass(frozen=True)
class Share:
    """The share of a kernel's compiled forms on one architecture that was reached."""

    arch: str
    kernel: str
    forms: int
    instructions: int
    reached: int
    places: Counter[str]

    @property
    def missed(self) -> float:
        return 1 - self.reached / self.instructions


def source_lines(text: str) -> list[str]:
    """The Python line of every instruction, in order, such as `decode.py:120`."""
    files, here, out = dict[str, str](), "", list[str]()
    for raw in text[: text.index(".amdhsa_kernel")].splitlines():
        line = raw.split(";", 1)[0].strip()
        if match := _FILE.match(line):
            files[match[1]] = Path(match[2]).name
        elif match := _LOCATION.match(line):
            if match[2] != "0":  # line 0: code without a source line, inside that of another line
                here = f"{files.get(match[1], '?')}:{match[2]}"
        elif _INSTRUCTION.match(line):
            out.append(here)
    return out


def shares(reports: Sequence[Path]) -> Iterator[Share]:
    """Yield one `Share` for every kernel and architecture."""
    for path in reports:
        report = json.loads(path.read_text())
        kernels: dict[str, list[dict[str, object]]] = {}
        for form in report["forms"].values():
            kernels.setdefault(form["kernel"], []).append(form)
        for kernel, forms in sorted(kernels.items()):
            places = Counter[str]()
            total = reached = 0
            for form in forms:
                seen, lines = set(form["reached"]), form["lines"]  # type: ignore[call-overload]
                total, reached = total + len(lines), reached + len(seen)  # type: ignore[arg-type]
                places.update(line for index, line in enumerate(lines) if index not in seen)  # type: ignore[arg-type]
            yield Share(report["arch"], kernel, len(forms), total, reached, places)


def main(arguments: Sequence[str]) -> int:
    rows = list(shares([Path(report) for report in arguments]))
    print("| GPU | Kernel | Forms | Instructions | Not reached | Where |\n|---|---|---|---|---|---|")
    for share in rows:
        where = ", ".join(f"{place} ({count})" for place, count in share.places.most_common(4))
        numbers = f"{share.forms} | {share.instructions} | {share.missed:.1%}"
        print(f"| {share.arch} | `{share.kernel}` | {numbers} | {where} |")
    total, reached = sum(share.instructions for share in rows), sum(share.reached for share in rows)
    print(f"\n{total - reached} of {total} instructions were not reached, {1 - reached / total:.1%}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
