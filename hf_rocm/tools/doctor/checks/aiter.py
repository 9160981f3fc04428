"""aiter: whether AMD's package is installed and importable, its cache usable, and its table tuned for this GPU."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from hf_rocm.architectures import INSTINCT, NEWEST_AITER, RADEON
from hf_rocm.tools.doctor.facts import Aiter, Facts, JitCache
from hf_rocm.tools.doctor.report import Finding, ok, pluralized, problem, warning

INSTALL = "scripts/install-aiter, in a clone of hf_rocm, picks the release that fits (or: pip install amd-aiter)"
RADEON_SINCE = Version("0.1.19")
# The first and the last release whose import hides errors, so that functions can be missing.
INCOMPLETE = (Version("0.1.12"), Version("0.1.14.post1"))
# An installation writes its files within a minute, and no build takes an hour.
MINUTE, HOUR = 60.0, 3600.0


def aiter(facts: Facts) -> Iterator[Finding]:
    local_aiter = facts.aiter
    if local_aiter.package.path is None:
        if any(gfx in INSTINCT for gfx in facts.gpus):
            yield warning(
                "aiter",
                "aiter, which has AMD's fastest kernels for this GPU, is not installed",
                means="attention, linear layers and norms use hf_rocm's and PyTorch's kernels: correct, but slower",
                fix=INSTALL,
            )
        elif any(gfx in RADEON for gfx in facts.gpus):
            yield ok("aiter", "not installed; its support for Radeon is experimental (some HIP and Triton kernels)")
        return
    if not local_aiter.package.amd:
        yield problem(
            "aiter",
            f"the package `aiter` here ({local_aiter.package.version or 'version unknown'}) is an unrelated asyncio "
            f"helper, not AMD's aiter",
            means="AMD's package is amd-aiter; this one hides it, so none of AMD's kernels are used",
            fix="pip uninstall -y aiter && pip install amd-aiter",
        )
        return
    yield from _release(facts, local_aiter)
    yield from _import(local_aiter)
    if local_aiter.cache is not None:
        yield from _cache(local_aiter, local_aiter.cache, facts.now)
    yield from _table(facts, local_aiter)


def _release(facts: Facts, local_aiter: Aiter) -> Iterator[Finding]:
    version, name = facts.version_of("amd-aiter"), f"amd-aiter {local_aiter.package.version or '(version unknown)'}"
    radeon = [gfx for gfx in dict.fromkeys(facts.gpus) if gfx in RADEON]
    unserved = [gfx for gfx in dict.fromkeys(facts.gpus) if gfx not in INSTINCT + RADEON]
    if radeon and version is not None and version < RADEON_SINCE:
        yield warning(
            "aiter",
            f"{name} is older than {RADEON_SINCE}, the first release that supports {' and '.join(radeon)}",
            means="none of its kernels are used on this card",
            fix=INSTALL,
        )
    elif unserved and len(unserved) == len(set(facts.gpus)):
        yield ok("aiter", f"{name}; it has no kernels for {' and '.join(unserved)}, so it is not used")
    elif version is not None and Version(version.public) > Version(NEWEST_AITER):
        yield warning(
            "aiter",
            f"{name} is newer than {NEWEST_AITER}, the newest release that hf_rocm was checked with",
            means="its kernels are used only if you select aiter, after they have passed their checks on this machine",
            fix=f"{INSTALL}; or HF_ROCM_TIER=aiter, then `hf-rocm verify MODEL`",
        )
    else:
        yield ok("aiter", name)


def _import(local_aiter: Aiter) -> Iterator[Finding]:
    result = local_aiter.result
    if result is None:
        yield ok(
            "aiter-import",
            "not tried: the first import compiles for minutes (`hf-rocm warmup MODEL` does this in advance)",
        )
    elif result.error:
        yield problem(
            "aiter-import",
            f"aiter can't be imported: {result.error}",
            means="none of its kernels are used; hf_rocm's and PyTorch's kernels run instead",
            fix=_mend(result.error, local_aiter),
        )
    elif result.facts.get("missing"):
        yield problem(
            "aiter-import",
            f"aiter was imported only in part: {', '.join(result.facts['missing'])} missing",
            means=f"releases {INCOMPLETE[0]} to {INCOMPLETE[1]} hide the error that stopped the import; "
            "hf_rocm's and PyTorch's kernels replace the missing functions",
            fix="AITER_LOG_LEVEL=INFO python -c 'import aiter' shows the error; a newer release raises it: " + INSTALL,
        )
    else:
        yield ok("aiter-import", "it can be imported, and none of the functions that were checked is missing")


def _mend(error: str, local_aiter: Aiter) -> str:
    if "undefined symbol" in error or "has no attribute" in error:
        return _clear(local_aiter.cache) if local_aiter.cache else INSTALL
    if "ROCm version file" in error or "rocminfo" in error or "hipconfig" in error:
        return "fix what the checks rocm, rocminfo and tools report: aiter reads ROCm's version and runs rocminfo"
    if "No module named" in error:
        missing = error.rsplit("No module named", 1)[1].strip(" '\"").split(".")[0]
        return f"pip install {missing}" if missing not in ("aiter", "torch", "triton") else INSTALL
    return f"python -c 'import aiter' shows the whole error; {INSTALL}"


def _cache(local_aiter: Aiter, cache: JitCache, now: float) -> Iterator[Finding]:
    if not cache.writable:
        yield problem(
            "aiter-cache",
            f"aiter cannot write its compiled modules to {cache.folder}",
            means="it compiles again in every process, or fails",
            fix="export AITER_JIT_DIR=$HOME/.cache/aiter-jit",
        )
        return
    newest = max(local_aiter.installed, local_aiter.torch_installed)
    stale = sorted(name for name, built in cache.modules.items() if built < newest - MINUTE)
    locks = sorted(name for name, created in cache.locks.items() if now - created > HOUR)
    if stale:
        package = "torch" if local_aiter.torch_installed >= local_aiter.installed else "aiter"
        yield warning(
            "aiter-cache",
            f"{pluralized(len(stale), 'compiled module')} in {cache.folder} older than the installed {package}",
            means="loading them can fail with an undefined symbol, or crash",
            fix=_clear(cache),
        )
    if locks:
        yield warning(
            "aiter-cache",
            f"{pluralized(len(locks), 'lock')} in {cache.folder}/build, more than an hour old ({', '.join(locks[:3])})",
            means="a build was interrupted; the next one may wait for it forever",
            fix=f"rm -f {cache.folder}/build/lock_* {cache.folder}/build/*.lock",
        )
    if not stale and not locks:
        yield ok("aiter-cache", f"{pluralized(len(cache.modules), 'compiled module')} in {cache.folder}")


def _clear(cache: JitCache | None) -> str:
    assert cache is not None
    return f"rm -rf {cache.folder}/module_*.so {cache.folder}/build, then hf-rocm warmup MODEL"


def _table(facts: Facts, local_aiter: Aiter) -> Iterator[Finding]:
    named = facts.set("AITER_CONFIG_GEMM_BF16")
    for gfx in dict.fromkeys(name for name in facts.gpus if name in INSTINCT):
        rows = local_aiter.rows.get(gfx, 0)
        if rows or named:
            yield ok(
                "aiter-table",
                f"tuned GEMMs for {gfx} in aiter's table: {rows}{f'; yours: {named}' if named else ''}",
            )
        else:
            yield warning(
                "aiter-table",
                f"aiter's table has no tuned GEMM for {gfx}",
                means="linear layers use the library's default choice, which is often as good; tuning may gain a "
                "little",
                fix="hf-rocm tune MODEL",
            )
