"""The suites that execute the Triton kernels as the machine code of AMD GPUs, one per architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lib.environments import Environment
from lib.suites import REPORTS, Suite

# Architectures with different instruction sets.
ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
# gfx115x has the instructions of gfx1100 plus scalar floating-point instructions; gfx1200 has those of gfx1201.
RELATIVES = ("gfx1150", "gfx1151", "gfx1200")
# The architecture for which `--all` runs a larger sample: that of MI300X.
LARGE = "gfx942"
KERNELS = "tests/triton"


def default_suites(environment: Environment, *, everything: bool) -> list[Suite]:
    """The suites of `scripts/test`. everything: return those of `scripts/test --all` instead."""
    if not everything:
        return suites(environment, share="sample")
    sampled = [arch for arch in ARCHITECTURES if arch != LARGE]
    return [
        *suites(environment, share="large", architectures=[LARGE]),
        *suites(environment, share="sample", architectures=sampled),
        # gfx1150 differs from gfx1151 only in the number of compute units.
        *suites(environment, share="few", architectures=[arch for arch in RELATIVES if arch != "gfx1150"]),
    ]


def suites(environment: Environment, *, share: str, architectures: Sequence[str] = ARCHITECTURES) -> list[Suite]:
    """The suites for these architectures. share: the cases to run, such as `few`, `sample` or `all`."""
    planned = []
    for arch in architectures:
        chosen = ("--machine-code", arch, "--machine-code-share", share)
        written = ("--machine-code-report", str(report(arch)))
        planned.append(Suite(f"machine code, {arch}", environment, (KERNELS, *chosen, *written)))
    return planned


def report(arch: str) -> Path:
    """The file in which a run records the executed instructions."""
    return REPORTS / f"machine-code-{arch}.json"
