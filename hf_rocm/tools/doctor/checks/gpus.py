"""The GPUs: their architectures and tiers, overrides of the architecture, and the memory of integrated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm import __version__
from hf_rocm.architectures import KNOWN, gfx_of_version, tiers
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, problem, warning

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
CARVE_OUT = "https://github.com/ROCm/hip/issues/3892"
GIB = 2**30


def gpus(facts: Facts) -> Iterator[Finding]:
    """Yield the tiers of each architecture, and the problems caused by different architectures in one machine."""
    if facts.system.name != "Linux":
        return
    different = tuple(dict.fromkeys(facts.gpus))
    for gfx in different:
        yield _tiers(facts, gfx)
    if len(different) > 1:
        yield _mixed(facts, different)


def _tiers(facts: Facts, gfx: str) -> Finding:
    known = KNOWN.get(gfx)
    built = facts.torch_result.facts.get("built_for")
    support = {True: "built for it", False: "not built for it"}[gfx in built] if built else "unknown"
    words = "; ".join(f"{tier}: {text}" for tier, text in {**tiers(gfx), "torch": support}.items())
    if known:
        return ok("tiers", f"{gfx} ({known.family}: {known.cards}); {words}")
    return warning(
        "tiers",
        f"hf_rocm {__version__} has no data on the architecture {gfx}; {words}",
        means="models on this GPU use PyTorch's kernels, and the Triton kernels that pass their check",
        fix="pip install --upgrade hf-rocm, or report it with the output of `hf-rocm env`",
    )


def _mixed(facts: Facts, different: tuple[str, ...]) -> Finding:
    integrated = [gfx for gfx in different if gfx in KNOWN and KNOWN[gfx].integrated]
    if integrated and len(integrated) < len(different):
        keep = ",".join(str(index) for index, gfx in enumerate(facts.gpus) if gfx not in integrated)
        reason = f"{', '.join(integrated)} is part of the CPU; torch may select it, or fail on it"
        hide = f"export HIP_VISIBLE_DEVICES={keep}"
    else:
        keep = ",".join(str(index) for index, gfx in enumerate(facts.gpus) if gfx == different[0])
        reason = "kernels are checked and tuned for one architecture; aiter assumes one for all GPUs of a process"
        hide = f"export HIP_VISIBLE_DEVICES={keep} (use one architecture per process)"
    if facts.set("HIP_VISIBLE_DEVICES") or facts.set("ROCR_VISIBLE_DEVICES"):
        present = f"{' and '.join(different)} are in this machine"
        return ok("mixed", f"{present}; HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES selects among them")
    return warning("mixed", f"{' and '.join(different)} are in one machine", means=reason, fix=hide)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Report how much of the host's memory an integrated GPU can use."""
    gpu = facts.shares_memory
    if gpu is None:
        return
    total, carved_out, mapped = int(str(gpu["total"])), facts.driver.carved_out, facts.driver.mapped
    summary = f"{gpu['name']} shares the host's memory: torch can use {total / GIB:.1f} GiB"
    if carved_out and mapped > total and total <= carved_out:
        yield warning(
            "shared-memory",
            f"{summary}, which the firmware reserved for it, but not the other {mapped / GIB:.1f} GiB that the driver "
            "can map",
            means="larger models and caches do not fit, and the host cannot use the unused part of the reserved memory",
            fix="set the smallest carve-out in the firmware (512 MiB), and ttm.pages_limit=BYTES/4096 on the kernel's "
            "command line",
            link=CARVE_OUT,
        )
    else:
        yield ok("shared-memory", f"{summary}; memory that the host's processes use is not available")


def override(facts: Facts) -> Iterator[Finding]:
    value = facts.set(OVERRIDE)
    if facts.system.name != "Linux" or not value:
        return
    claimed = gfx_of_version(value)
    real = tuple(dict.fromkeys(facts.driver.gpus))
    if claimed is None:
        yield warning(
            "override",
            f"{OVERRIDE}={value} is not of the form 11.0.0",
            means="the runtime ignores it, or fails",
            fix=f"unset {OVERRIDE}",
        )
    elif real and set(real) == {claimed}:
        yield ok("override", f"{OVERRIDE}={value} names the card's real architecture ({claimed}); it can be removed")
    else:
        yield _mismatch(facts, value, claimed, real)


def _mismatch(facts: Facts, value: str, claimed: str, real: tuple[str, ...]) -> Finding:
    known = f"{' and '.join(real)} {'is' if len(real) == 1 else 'are'} treated as {claimed}"
    summary = f"{OVERRIDE}={value}: {known if real else f'every GPU is treated as {claimed}'}"
    means = "kernels for another card run on this one; they can crash or return wrong results"
    if len(facts.gpus) > 1:
        means += "; it applies to all GPUs"
    built = facts.torch_result.facts.get("built_for", ())
    if real and all(gpu in built for gpu in real):
        means += f"; this torch was built for {' and '.join(real)} and doesn't need it"
        return problem("override", summary, means=means, fix=f"unset {OVERRIDE}")
    return warning(
        "override",
        summary,
        means=means,
        fix=f"install a torch that was built for {' and '.join(real) or 'this card'}, and unset {OVERRIDE}; "
        "if you must keep it, run `hf-rocm verify MODEL`",
    )
