"""The operating system."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm import __version__
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, problem


def system(facts: Facts) -> Iterator[Finding]:
    name = facts.system.name
    if name == "Windows":
        yield problem(
            "system",
            "this is native Windows",
            means="hf_rocm is made for Linux; its kernels, aiter and the overlays' installer are not used here",
            fix="wsl --install -d Ubuntu-24.04, install AMD's driver for WSL, and run hf-rocm inside it "
            "(docs/troubleshooting.md has the steps)",
        )
    elif name != "Linux":
        yield problem(
            "system",
            f"this is {name}",
            means=f"ROCm does not support {name}; models run stock here",
            fix="use a Linux machine with an AMD GPU",
        )
    else:
        words = f"hf-rocm {__version__}, Linux {facts.system.release}, Python {facts.system.python}"
        if facts.wsl:
            words += ", in WSL"
        if facts.container:
            words += f", in a container ({facts.container})"
        yield ok("system", words)
