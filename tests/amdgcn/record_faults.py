"""Plant faults in the machine code for some GPUs and record what became of them in docs/machine-code-faults.md.

    python -m tests.amdgcn.record_faults [ARCH ...] [--seed 1] [--count 60]

An architecture takes minutes. The sections of the others stay as they are. Exits with 1 if less than 95 % of the faults
that change something were detected.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.amdgcn.by_hand import PROOFS
from tests.amdgcn.one import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "machine-code-faults.md"
REPORTS = ROOT / ".envs" / "reports"
WANTED = 0.95

_SUMMARY = re.compile(r"(\d+) planted with seed \d+, (\d+) detected, (\d+) change nothing, (\d+) not detected\.")
_HEAD = "| Kernel | Kind | Instruction | Fault | Detected by |\n|---|---|---|---|---|"
_INTRODUCTION = """# Planted faults

One-instruction faults in the machine code, drawn by seed over kernels, their compiled forms and the instructions that
a case reached, and what detected them: see [machine-code.md](machine-code.md#planted-faults). Written by
`python -m tests.amdgcn.record_faults`. *Changes nothing* stands where a proof succeeded, which is named then, by
`tests/amdgcn/equivalent.py` or by hand (`tests/amdgcn/by_hand.py`); what was neither detected nor proven is
**not detected**.
"""


def section(arch: str, seed: int, faults: Sequence[Mapping[str, Any]]) -> str:
    """What one architecture's faults came to."""
    found = sum(each["found"] is not None for each in faults)
    proven = sum(each["found"] is None and _proof(each, arch) is not None for each in faults)
    counts = f"{len(faults)} planted with seed {seed}, {found} detected, {proven} change nothing"
    rows = [_row(each, arch) for each in faults]
    summary = f"{counts}, {len(faults) - found - proven} not detected."
    return "\n".join([f"## {arch}", "", summary, "", _HEAD, *rows]) + "\n"


def _proof(fault: Mapping[str, Any], arch: str) -> str | None:
    """Why a fault changes nothing, proven by the analysis or by hand, or None."""
    by_hand = PROOFS.get((arch, fault["kernel"], fault["before"], fault["after"]))
    return fault["proof"] or (by_hand and f"{by_hand} (by hand)")


def _row(fault: Mapping[str, Any], arch: str) -> str:
    if fault["found"]:
        outcome = fault["found"]
    elif proof := _proof(fault, arch):
        outcome = f"changes nothing: {proof}"
    else:
        outcome = f"**not detected** by {fault['cases']} cases"
    before, after = (fault[name].replace("|", "\\|") for name in ("before", "after"))
    return f"| {fault['kernel']} | {fault['kind']} | `{before}` | `{after}` | {outcome} |"


def page(sections: Mapping[str, str]) -> str:
    """The whole page."""
    planted, found, proven, missed = totals(sections)
    architectures = ", ".join(sections)
    share = found / max(1, planted - proven)
    total = (
        f"In all, for {architectures}: {planted} planted, {found} detected, {proven} change nothing, {missed} not\n"
        f"detected. Of those that change something, {share:.1%} were detected.\n"
    )
    return "\n".join([_INTRODUCTION, total, *sections.values()])


def totals(sections: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(planted, detected, without effect, not detected) of all sections."""
    counts = [tuple(map(int, match)) for text in sections.values() for match in _SUMMARY.findall(text)]
    return tuple(map(sum, zip(*counts, strict=True)))  # type: ignore[return-value]


def sections_of(text: str) -> dict[str, str]:
    """The sections of a page by architecture."""
    parts = re.split(r"(?m)^(?=## gfx)", text)[1:]
    return {part.split(None, 2)[1]: part.rstrip() + "\n" for part in parts}


def plant(arch: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Run the cases that `scripts/test --all` runs, with faults."""
    path = REPORTS / f"machine-code-faults-{arch}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    chosen = ["--machine-code", arch, "--machine-code-share", "large", "--machine-code-seed", str(seed)]
    faults = ["--machine-code-faults", str(count), "--machine-code-report", str(path)]
    subprocess.run([sys.executable, "-m", "pytest", "tests/triton", *chosen, *faults], cwd=ROOT, check=True)
    planted: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return planted


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", metavar="ARCH", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="faults for each architecture (default: 60)")
    options = parser.parse_args(arguments)
    for arch in options.architectures:
        text = section(arch, options.seed, plant(arch, options.seed, options.count))
        known = sections_of(PAGE.read_text(encoding="utf-8")) | {arch: text}
        ordered = {name: known[name] for name in sorted(known, key=_order)}
        PAGE.write_text(page(ordered), encoding="utf-8")
    planted, found, proven, _ = totals(sections_of(PAGE.read_text(encoding="utf-8")))
    return int(found < WANTED * (planted - proven))


def _order(arch: str) -> int:
    return ARCHITECTURES.index(arch) if arch in ARCHITECTURES else len(ARCHITECTURES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
