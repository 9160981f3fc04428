"""ROCm's user space: how old, and whether the tools that aiter starts are there."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.diagnostics.doctor import rocminfo
from hf_rocm.diagnostics.doctor.facts import Facts, short, version
from hf_rocm.diagnostics.doctor.report import Finding, counted, ok, problem, warning

# the oldest ROCm that a PyTorch which hf_rocm supports (2.6) was built for
OLDEST = "6.1"


def rocm(facts: Facts) -> Iterator[Finding]:
    if facts.system.name != "Linux" or not facts.amd:
        return
    yield _version(facts)
    if facts.rocm.rocminfo is not None:
        yield from _rocminfo(facts)
    yield _tools(facts)


def _version(facts: Facts) -> Finding:
    here, built = version(facts.rocm.version), version(short(facts.torch.hip or ""))
    if here is None:
        own = facts.packages.get("rocm-sdk-core") or facts.packages.get("rocm")
        if own:
            return ok("rocm", f"ROCm {own}, as a Python package")
        carried = f"; torch brings its own libraries of ROCm {built}" if built else ""
        return ok("rocm", f"no ROCm under /opt/rocm{carried}")
    if here.release < version(OLDEST).release:  # type: ignore[union-attr]
        return problem(
            "rocm",
            f"ROCm {here} is older than any that a supported PyTorch was built for ({OLDEST})",
            means="kernels that are compiled here (aiter, Triton) don't fit the libraries that torch brings",
            fix=f"install a newer ROCm (AMD's guide: rocm.docs.amd.com){_like(facts)}",
        )
    if built is not None and here.release[:1] != built.release[:1]:
        return warning(
            "rocm",
            f"ROCm {here} is installed, and torch was built for ROCm {built}",
            means="torch has libraries of its own, but what is compiled here (aiter) is linked against the others",
            fix=f"install a torch for ROCm {here.major} or ROCm {built.major}.{built.minor}",
        )
    return ok("rocm", f"ROCm {here}" + (f", torch's is {built}" if built else ""))


def _like(facts: Facts) -> str:
    built = version(short(facts.torch.hip or ""))
    return f": {built.major}.{built.minor}, as torch has it" if built else ""


def _rocminfo(facts: Facts) -> Iterator[Finding]:
    ran = facts.rocm.rocminfo
    assert ran is not None
    complaint = rocminfo.complaint(ran.text)
    if ran.code is None:
        yield warning(
            "rocminfo",
            "rocminfo did not end in time",
            means="the driver hangs, or another process holds the GPU; aiter starts rocminfo when it is imported",
            fix="sudo dmesg | grep -iE 'amdgpu|kfd' | tail",
        )
    elif not facts.rocm.agents:
        yield warning(
            "rocminfo",
            f"rocminfo lists no GPU{f': {complaint}' if complaint else ''}",
            means="the runtime can't use the card, for torch neither",
            fix="see the line on the driver above; rocminfo shows the same message until it is mended",
        )
    else:
        yield ok("rocminfo", counted(f"{each.card or 'a GPU'} ({each.name})" for each in facts.rocm.agents))


def _tools(facts: Facts) -> Finding:
    missing = [name for name, there in facts.rocm.tools.items() if not there]
    if not missing:
        return ok("tools", "rocminfo, hipconfig and hipcc are there")
    if not facts.aiter.found.amd:
        return ok("tools", f"no {', '.join(missing)}: aiter would need them, torch doesn't")
    return problem(
        "tools",
        f"{', '.join(missing)} can't be found, neither on PATH nor in /opt/rocm/bin",
        means="aiter starts them when it is imported and compiles with them, so it can't be used",
        fix="sudo apt install rocminfo hipcc rocm-dev, or export PATH=$PATH:/opt/rocm/bin if they are elsewhere",
    )
