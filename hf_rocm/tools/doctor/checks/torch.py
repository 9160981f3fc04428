"""Check whether the installed torch supports the GPUs of this machine and works on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_rocm.known_faults import graph_faults
from hf_rocm.tools.doctor.checks.allocator import blamed
from hf_rocm.tools.doctor.facts import Facts, short, version
from hf_rocm.tools.doctor.report import Finding, counted, ok, problem, warning

INDEX = "https://download.pytorch.org/whl/rocm"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# ROCm releases of PyTorch's own builds, the preferred one first.
INDEXES = ("7.2", "7.1")
OLDEST = "2.6"
# The newest release of torch with which the tests were run.
NEWEST_TESTED = "2.13.0"
FLASH = "https://github.com/unslothai/unsloth/pull/8821"


def torch(facts: Facts) -> Iterator[Finding]:
    if facts.system.name not in ("Linux", "Windows"):
        return
    yield _build(facts)
    if facts.torch.version is None:
        return
    if facts.torch_result.error and not facts.torch_result.facts:
        yield _not_importable(facts)
        return
    if facts.torch.hip and facts.amd:
        yield from _on_gpu(facts)


def install(*gpus: str, force: bool = True) -> str:
    """Return the command that installs PyTorch's build for these GPUs, if possible with a ROCm release whose graph
    replays have no known faults on them."""
    sound = (release for release in INDEXES if not any(graph_faults(gfx, release) for gfx in gpus))
    flag = "--force-reinstall " if force else ""
    return f"pip install {flag}torch --index-url {INDEX}{next(sound, INDEXES[0])}"


def _build(facts: Facts) -> Finding:
    torch_facts = facts.torch
    if torch_facts.version is None:
        return problem(
            "torch", "torch is not installed", means="nothing can run", fix=install(*facts.gpus, force=False)
        )
    build = (
        f"ROCm {short(facts.rocm_release or torch_facts.hip)}"
        if torch_facts.hip
        else f"CUDA {torch_facts.cuda}"
        if torch_facts.cuda
        else "the CPU"
    )
    summary = f"{torch_facts.version}, built for {build}"
    if facts.amd and not torch_facts.hip:
        return problem(
            "torch",
            f"{summary}, on a machine with an AMD GPU",
            means="it cannot see the GPU: models run on the CPU, without an error; a plain `pip install torch` has "
            "this effect",
            fix=install(*facts.gpus),
        )
    installed = version(torch_facts.version)
    if installed is not None and installed.release < version(OLDEST).release:  # type: ignore[union-attr]
        return problem(
            "torch", f"{summary}, older than {OLDEST}", means="hf_rocm does not support it", fix=install(*facts.gpus)
        )
    return ok("torch", "; ".join((summary, *_notes(facts))))


def _notes(facts: Facts) -> Iterator[str]:
    """Yield remarks on a supported build: a release newer than the tested ones, or CUDA without an NVIDIA GPU."""
    installed, newest = version(facts.torch.version), version(NEWEST_TESTED)
    if installed is not None and newest is not None and installed.release > newest.release:
        yield f"newer than {NEWEST_TESTED}, the newest release that hf_rocm was tested with"
    if facts.torch.cuda and not facts.nvidia and not facts.wsl:
        command = f"pip install --force-reinstall torch --index-url {CPU_INDEX}"
        yield f"there is no NVIDIA GPU here, and the CPU build is smaller: {command}"


def _not_importable(facts: Facts) -> Finding:
    command = install(*facts.gpus)
    return problem(
        "torch-import",
        f"torch cannot be imported: {facts.torch_result.error}",
        means="libraries that it needs are missing, or are from another ROCm release (LD_LIBRARY_PATH comes first)",
        fix=f"unset LD_LIBRARY_PATH and try again; else {command}" if facts.set("LD_LIBRARY_PATH") else command,
    )


def _on_gpu(facts: Facts) -> Iterator[Finding]:
    result = facts.torch_result
    if result.error and not blamed(facts):
        yield problem(
            "torch-gpu",
            f"torch failed during {result.stage}: {result.error}",
            means="models will fail in the same way; facts that depend on it are missing below",
            fix="AMD_LOG_LEVEL=3 python -c 'import torch; torch.ones(1).cuda()' shows what the runtime did last",
        )
    missing = _missing(facts)
    if missing:
        yield _not_built(facts, missing)
    elif result.facts.get("available") is False and not result.error:
        yield problem(
            "torch-gpu",
            f"torch sees no GPU: {result.facts.get('why_not') or 'no reason given'}",
            means="models run on the CPU",
            fix="solve the problems above first (driver, visible-devices); AMD_LOG_LEVEL=3 shows what the runtime does",
        )
    served = [(index, device) for index, device in enumerate(facts.devices) if device["arch"] not in missing]
    wrong = [_wrong(index, device) for index, device in served if device.get("gemm")]
    yield from wrong
    if served and not wrong and not result.error:
        names = counted(f"{device['name']} ({device['arch']}, {_gib(device['total'])})" for _, device in served)
        yield ok(
            "torch-gpu",
            f"{names}: a test GEMM on each is correct" if len(served) > 1 else f"{names}: a test GEMM is correct",
        )
    yield from _flash(facts)


def _not_built(facts: Facts, missing: list[str]) -> Finding:
    built = facts.torch_result.facts["built_for"]
    others = [str(index) for index, device in enumerate(facts.devices) if device["arch"] not in missing]
    summary = f"this torch was not built for {' and '.join(missing)}, only for {', '.join(built)}"
    means = "kernels fail on these GPUs with 'no kernel image is available for execution on the device'"
    if others:
        return warning("torch-gpu", summary, means=means, fix=f"export HIP_VISIBLE_DEVICES={','.join(others)}")
    return problem(
        "torch-gpu", summary, means=means, fix=f"{install(*missing)}, or AMD's wheels for that card (TheRock)"
    )


def _missing(facts: Facts) -> list[str]:
    """Return the architectures in this machine for which torch has no kernels."""
    built = facts.torch_result.facts.get("built_for")
    if not built:
        return []
    architectures = [str(device["arch"]) for device in facts.devices] or list(facts.gpus)
    plain = {arch.split(":")[0] for arch in built}
    return [arch for arch in dict.fromkeys(architectures) if arch not in plain and not _generic(arch, plain)]


# LLVM's generic targets, with the first characters of the architectures that they include.
_GENERIC = {
    "gfx9-generic": ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
    "gfx9-4-generic": ("gfx94", "gfx950"),
    "gfx10-1-generic": ("gfx101",),
    "gfx10-3-generic": ("gfx103",),
    "gfx11-generic": ("gfx110", "gfx115"),
    "gfx12-generic": ("gfx120",),
}


def _generic(gfx: str, built: set[str]) -> bool:
    """Return whether code for one of LLVM's generic targets, such as `gfx11-generic`, runs on this GPU."""
    return any(gfx.startswith(members) for target, members in _GENERIC.items() if target in built)


def _wrong(index: int, device: Mapping[str, Any]) -> Finding:
    return problem(
        "torch-gpu",
        f"GPU {index} ({device['arch']}) fails a test GEMM: {device['gemm']}",
        means="every model returns wrong results on it",
        fix="unset HSA_OVERRIDE_GFX_VERSION, ROCBLAS_* and HIPBLASLT_*; else reinstall torch",
    )


def _flash(facts: Facts) -> Iterator[Finding]:
    """Check SDPA's flash kernel from AOTriton, which some builds lack or enable only on request for some GPUs."""
    reasons = {str(device["arch"]): device.get("flash", "") for device in facts.devices if "flash" in device}
    for gfx, reason in reasons.items():
        if not reason:
            yield ok("flash", f"SDPA has a flash kernel (AOTriton) for {gfx}")
        else:
            gate = "experimental" in str(reason).lower()
            yield warning(
                "flash",
                f"SDPA has no flash kernel for {gfx}: {reason}",
                means="attention falls back to plain GEMMs: slow, and memory grows with the square of the length "
                "(at 4,096 tokens on a gfx1200 about 12 times slower, with 16 times the memory)",
                fix="export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1, then `hf-rocm verify MODEL`"
                if gate
                else f"install a torch whose AOTriton supports {gfx}: {install(gfx)}",
                link=FLASH,
            )


def _gib(count: object) -> str:
    return f"{int(str(count)) / 2**30:.0f} GiB"
