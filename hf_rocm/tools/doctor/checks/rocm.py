"""ROCm's user space: its release, the GPUs that rocminfo lists, and the tools that aiter needs."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.tools.doctor import rocminfo
from hf_rocm.tools.doctor.facts import Facts, short, version
from hf_rocm.tools.doctor.report import Finding, counted, ok, problem, warning

# The oldest ROCm for which PyTorch 2.6 was built. hf_rocm supports no older release of PyTorch.
OLDEST = "6.1"


def rocm(facts: Facts) -> Iterator[Finding]:
    if facts.system.name != "Linux" or not facts.amd:
        return
    yield _version(facts)
    if facts.rocm.rocminfo is not None:
        yield from _rocminfo(facts)
    yield _tools(facts)


def _version(facts: Facts) -> Finding:
    installed, built = version(facts.rocm.version), version(short(facts.rocm_release or ""))
    if installed is None:
        own = facts.packages.get("rocm-sdk-core") or facts.packages.get("rocm")
        if own:
            return ok("rocm", f"ROCm {own}, as a Python package")
        carried = f"; torch includes the libraries of ROCm {built}" if built else ""
        return ok("rocm", f"no ROCm under /opt/rocm{carried}")
    if installed.release < version(OLDEST).release:  # type: ignore[union-attr]
        return problem(
            "rocm",
            f"ROCm {installed} is older than {OLDEST}, the oldest release for which a supported PyTorch was built",
            means="kernels that are compiled here (aiter, Triton) do not match the libraries of torch",
            fix=f"install a newer ROCm (AMD's guide: rocm.docs.amd.com){_preferred(facts)}",
        )
    if built is not None and installed.release[:1] != built.release[:1]:
        return warning(
            "rocm",
            f"ROCm {installed} is installed, and torch was built for ROCm {built}",
            means="torch uses its own libraries, but kernels that are compiled here (aiter) are linked against the "
            "installed ones",
            fix=f"install a torch for ROCm {installed.major} or ROCm {built.major}.{built.minor}",
        )
    return ok("rocm", f"ROCm {installed}" + (f"; torch uses {built}" if built else ""))


def _preferred(facts: Facts) -> str:
    built = version(short(facts.rocm_release or ""))
    return f": {built.major}.{built.minor}, the release that torch uses" if built else ""


def _rocminfo(facts: Facts) -> Iterator[Finding]:
    ran = facts.rocm.rocminfo
    assert ran is not None
    complaint = rocminfo.complaint(ran.text)
    if ran.code is None:
        yield warning(
            "rocminfo",
            "rocminfo timed out",
            means="the driver hangs, or another process blocks the GPU; aiter runs rocminfo when it is imported",
            fix="sudo dmesg | grep -iE 'amdgpu|kfd' | tail",
        )
    elif not facts.rocm.agents:
        yield warning(
            "rocminfo",
            f"rocminfo lists no GPU{f': {complaint}' if complaint else ''}",
            means="the runtime cannot use the card, so torch cannot either",
            fix="see the line about the driver above; rocminfo prints the same message until it is fixed",
        )
    else:
        yield ok("rocminfo", counted(f"{agent.card or 'a GPU'} ({agent.name})" for agent in facts.rocm.agents))


def _tools(facts: Facts) -> Finding:
    missing = [name for name, installed in facts.rocm.tools.items() if not installed]
    if not missing:
        return ok("tools", "rocminfo, hipconfig and hipcc are installed")
    if not facts.aiter.package.amd:
        return ok("tools", f"no {', '.join(missing)}: needed by aiter, not by torch")
    return problem(
        "tools",
        f"{', '.join(missing)} not found on PATH or in /opt/rocm/bin",
        means="aiter runs them when it is imported and when it compiles, so it cannot be used",
        fix="sudo apt install rocminfo hipcc rocm-dev, or add their folder to PATH if they are installed elsewhere",
    )
