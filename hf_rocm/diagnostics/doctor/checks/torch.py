"""Is this torch made for this GPU, and does it work on it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_rocm.diagnostics.doctor.checks.allocator import blamed
from hf_rocm.diagnostics.doctor.facts import Facts, short, version
from hf_rocm.diagnostics.doctor.report import Finding, counted, ok, problem, warning

INDEX = "https://download.pytorch.org/whl/rocm7.2"
INSTALL = f"pip install --force-reinstall torch --index-url {INDEX}"
OLDEST = "2.6"


def torch(facts: Facts) -> Iterator[Finding]:
    if facts.system.name not in ("Linux", "Windows"):
        return
    yield _build(facts)
    if facts.torch.version is None:
        return
    if facts.torch_answer.error and not facts.torch_answer.facts:
        yield _not_importable(facts)
        return
    if facts.torch.hip and facts.amd:
        yield from _at_work(facts)


def _build(facts: Facts) -> Finding:
    found = facts.torch
    if found.version is None:
        return problem(
            "torch", "torch is not installed", means="nothing can run", fix=f"pip install torch --index-url {INDEX}"
        )
    made = f"ROCm {short(found.hip)}" if found.hip else f"CUDA {found.cuda}" if found.cuda else "the CPU"
    what = f"{found.version}, built for {made}"
    if facts.amd and not found.hip:
        return problem(
            "torch",
            f"{what}, on a machine with an AMD GPU",
            means="it can't see the GPU: models run on the CPU, without a word; a plain `pip install torch` does this",
            fix=INSTALL,
        )
    here = version(found.version)
    if here is not None and here.release < version(OLDEST).release:  # type: ignore[union-attr]
        return problem("torch", f"{what}, is older than {OLDEST}", means="hf_rocm is not made for it", fix=INSTALL)
    return ok("torch", what)


def _not_importable(facts: Facts) -> Finding:
    return problem(
        "torch-import",
        f"torch can't be imported: {facts.torch_answer.error}",
        means="libraries that it needs are missing, or are another ROCm's (LD_LIBRARY_PATH comes first)",
        fix=f"unset LD_LIBRARY_PATH and try again; else {INSTALL}" if facts.set("LD_LIBRARY_PATH") else INSTALL,
    )


def _at_work(facts: Facts) -> Iterator[Finding]:
    answer = facts.torch_answer
    if answer.error and not blamed(facts):
        yield problem(
            "torch-gpu",
            f"torch failed at {answer.stage}: {answer.error}",
            means="models will fail in the same place; the facts below end there",
            fix="AMD_LOG_LEVEL=3 python -c 'import torch; torch.ones(1).cuda()' shows what the runtime did last",
        )
    missing = _missing(facts)
    if missing:
        yield _not_built(facts, missing)
    elif answer.facts.get("available") is False and not answer.error:
        yield problem(
            "torch-gpu",
            f"torch sees no GPU: {answer.facts.get('why_not') or 'it gives no reason'}",
            means="models run on the CPU",
            fix="mend the lines above first (driver, visible-devices); then AMD_LOG_LEVEL=3 says what the runtime does",
        )
    served = [(index, each) for index, each in enumerate(facts.devices) if each["arch"] not in missing]
    wrong = [_wrong(index, each) for index, each in served if each.get("product")]
    yield from wrong
    if served and not wrong and not answer.error:
        names = counted(f"{each['name']} ({each['arch']}, {_gib(each['total'])})" for _, each in served)
        yield ok(
            "torch-gpu", f"{names}: a product on each is right" if len(served) > 1 else f"{names}: a product is right"
        )
    yield from _flash(facts)


def _not_built(facts: Facts, missing: list[str]) -> Finding:
    built = facts.torch_answer.facts["built_for"]
    others = [str(index) for index, each in enumerate(facts.devices) if each["arch"] not in missing]
    what = f"this torch was not built for {' and '.join(missing)} (but for {', '.join(built)})"
    means = "kernels fail on it with 'no kernel image is available for execution on the device'"
    if others:
        return warning("torch-gpu", what, means=means, fix=f"export HIP_VISIBLE_DEVICES={','.join(others)}")
    return problem("torch-gpu", what, means=means, fix=f"{INSTALL}, or AMD's wheels for that card (TheRock)")


def _missing(facts: Facts) -> list[str]:
    """The architectures that torch will meet and has no kernels for."""
    built = facts.torch_answer.facts.get("built_for")
    if not built:
        return []
    met = [str(each["arch"]) for each in facts.devices] or list(facts.gpus)
    plain = {each.split(":")[0] for each in built}
    return [each for each in dict.fromkeys(met) if each not in plain and not _generic(each, plain)]


def _generic(gfx: str, built: set[str]) -> bool:
    """Newer builds may hold `gfx11-generic`, which serves all of gfx11xx."""
    return any(each.endswith("-generic") and gfx.startswith(each.split("-")[0]) for each in built)


def _wrong(index: int, device: Mapping[str, Any]) -> Finding:
    return problem(
        "torch-gpu",
        f"GPU {index} ({device['arch']}) can't multiply: {device['product']}",
        means="no model can be right on it",
        fix="unset HSA_OVERRIDE_GFX_VERSION and what begins with ROCBLAS_ or HIPBLASLT_; else reinstall torch",
    )


def _flash(facts: Facts) -> Iterator[Finding]:
    """SDPA's flash kernel comes from AOTriton, which some builds lack, or keep closed for some architectures."""
    told = {str(each["arch"]): each.get("flash", "") for each in facts.devices if "flash" in each}
    for gfx, reason in told.items():
        if not reason:
            yield ok("flash", f"SDPA has a flash kernel (AOTriton) for {gfx}")
        else:
            gate = "experimental" in str(reason).lower()
            yield warning(
                "flash",
                f"SDPA has no flash kernel for {gfx}: {reason}",
                means="attention falls back to plain products: slow, and memory grows with the square of the length",
                fix="export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1, then `hf-rocm verify MODEL`"
                if gate
                else f"use a torch whose AOTriton has {gfx}: {INSTALL}",
            )


def _gib(count: object) -> str:
    return f"{int(str(count)) / 2**30:.0f} GiB"
