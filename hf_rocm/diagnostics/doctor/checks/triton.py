"""Triton, which comes with torch: hf_rocm's own kernels, torch.compile and parts of aiter need it."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from hf_rocm.diagnostics.doctor.facts import Facts
from hf_rocm.diagnostics.doctor.report import Finding, ok, problem, warning

# the names under which the one package is delivered
NAMES = ("triton", "pytorch-triton-rocm", "triton-rocm")
OLDEST = Version("3.2")  # for hf_rocm's kernels
NEWEST_FOR_AITER = Version("3.6")  # with which all of aiter was seen to import


def triton(facts: Facts) -> Iterator[Finding]:
    if not facts.amd and not facts.aiter.found.amd:
        return
    here = [name for name in NAMES if facts.packages.get(name)]
    if not here:
        if facts.torch.hip:
            yield warning(
                "triton",
                "Triton is not installed, which a ROCm build of torch brings along",
                means="hf_rocm's own kernels, torch.compile and some of aiter's kernels are off",
                fix=f"pip install --force-reinstall torch=={facts.torch.version}, from the index where it came from",
            )
    elif len(here) > 1:
        keep = here[-1]
        yield problem(
            "triton",
            f"{' and '.join(here)} are both installed",
            means="they are one package under two names, and overwrite each other's files",
            fix=f"pip uninstall -y triton && pip install --force-reinstall --no-deps {keep}=={facts.packages[keep]}",
        )
    else:
        yield _version(facts, here[0])


def _version(facts: Facts, name: str) -> Finding:
    version = facts.version_of(name)
    if version is not None and version < OLDEST:
        return warning(
            "triton",
            f"{name} {version} is older than {OLDEST}",
            means="hf_rocm's own kernels need a newer one; PyTorch's serve instead",
            fix="use a newer torch, which brings a newer Triton",
        )
    if version is not None and version.release[:2] > NEWEST_FOR_AITER.release and facts.aiter.found.amd:
        return warning(
            "triton",
            f"{name} {version} is newer than {NEWEST_FOR_AITER}, the newest that all of aiter was seen to import with",
            means="its Triton kernels may be left out (those of 0.1.20 fail with 3.9); its compiled ones stay",
            fix="keep the Triton that came with torch; `hf-rocm explain MODEL` says what is left out",
        )
    return ok("triton", f"{name} {facts.packages[name]}")
