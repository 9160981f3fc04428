"""Triton: it is installed with torch, and hf_rocm's kernels, torch.compile and parts of aiter need it."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, problem, warning

# The distributions that contain Triton.
NAMES = ("triton", "pytorch-triton-rocm", "triton-rocm")
# The oldest release with which hf_rocm's kernels work.
OLDEST = Version("3.2")
# The newest release with which all of aiter can be imported.
NEWEST_FOR_AITER = Version("3.6")


def triton(facts: Facts) -> Iterator[Finding]:
    if not facts.amd and not facts.aiter.package.amd:
        return
    present = [name for name in NAMES if facts.packages.get(name)]
    if not present:
        if facts.torch.hip:
            yield warning(
                "triton",
                "Triton, which a ROCm build of torch depends on, is not installed",
                means="hf_rocm's own kernels, torch.compile and some of aiter's kernels are disabled",
                fix=f"pip install --force-reinstall torch=={facts.torch.version}, from the index that it was "
                f"installed from",
            )
    elif len(present) > 1:
        *others, keep = present
        yield problem(
            "triton",
            f"{' and '.join(present)} are installed together",
            means="they contain the same package and overwrite each other's files",
            fix=f"pip uninstall -y {' '.join(others)} && pip install --force-reinstall --no-deps "
            f"{keep}=={facts.packages[keep]}",
        )
    else:
        yield _version(facts, present[0])


def _version(facts: Facts, name: str) -> Finding:
    version = facts.version_of(name)
    if version is not None and version < OLDEST:
        return warning(
            "triton",
            f"{name} {version} is older than {OLDEST}",
            means="hf_rocm's own kernels need a newer one; PyTorch's kernels run instead",
            fix="use a newer torch, which includes a newer Triton",
        )
    if version is not None and version.release[:2] > NEWEST_FOR_AITER.release and facts.aiter.package.amd:
        return warning(
            "triton",
            f"{name} {version} is newer than {NEWEST_FOR_AITER}, the newest release with which all of aiter can be "
            f"imported",
            means="aiter's Triton kernels may be unusable (those of 0.1.20 fail with 3.9); its compiled ones work",
            fix="keep the Triton that came with torch; `hf-rocm explain MODEL` lists what is unusable",
        )
    return ok("triton", f"{name} {facts.packages[name]}")
