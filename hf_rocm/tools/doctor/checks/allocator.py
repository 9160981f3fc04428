"""PyTorch's allocator: which of its environment variables takes effect, and whether its settings work."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.environment import ALLOCATOR, PORTABLE, conflicting, expands, without
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, problem, warning

MIB = 2**20


def allocator(facts: Facts) -> Iterator[Finding]:
    if not facts.torch.hip:
        return
    variables = {name: facts.set(name) for name in ALLOCATOR if facts.set(name)}
    if len(set(variables.values())) > 1:
        first = next(iter(variables))
        yield warning(
            "allocator",
            f"{' and '.join(variables)} are set to different values",
            means=f"PyTorch reads only one of them ({first}, if this release supports it)",
            fix=f"unset {' '.join(list(variables)[1:])}",
        )
    settings = next(iter(variables.values()), "")
    if conflicting(settings):
        yield problem(
            "allocator",
            f"{next(iter(variables))}={settings}: max_split_size_mb together with expandable_segments",
            means="memory grows until the card is full, and on some cards live tensors were read back as zeros "
            "(pytorch#123548, ROCm#6603)",
            fix=f"export {next(iter(variables))}={without(settings, 'max_split_size_mb')}",
        )
        return
    yield from _test_findings(facts, settings)


def blamed(facts: Facts) -> bool:
    """Return whether the settings made torch fail, either in their test or when torch opened the GPU."""
    result = facts.torch_result
    return bool(result.error) and ("allocator" in result.stage or "allocator config" in str(result.error).lower())


def _test_findings(facts: Facts, settings: str) -> Iterator[Finding]:
    """Yield the findings of the child process that ran with these settings."""
    result = facts.torch_result
    words = f"with {settings}" if settings else "with its defaults"
    test = result.facts.get("allocator")
    if blamed(facts):
        assert result.error is not None
        yield _refused(words, result.error)
    elif not test:
        if settings:
            yield ok("allocator", f"{settings}; not tested: there is no GPU")
    elif test["error"]:
        yield _refused(words, test["error"])
    elif expands(settings) and test.get("expandable") is False:
        yield warning(
            "allocator",
            f"{settings}: expandable segments have no effect here",
            means="this build, or this release, ignores the setting (PyTorch 2.9 ignores it in PYTORCH_ALLOC_CONF)",
            fix=f"export {PORTABLE}={settings}, or leave it out",
        )
    elif test["reserved_after_8"] > test["reserved_after_2"] + 512 * MIB:
        grown = (test["reserved_after_8"] - test["reserved_after_2"]) // MIB
        yield warning(
            "allocator",
            f"freed memory was not reused {words}: {grown} MiB more after six rounds of the same requests",
            means="long runs fill the card",
            fix="leave the setting out, or try expandable_segments:True alone",
        )
    else:
        yield ok("allocator", f"tried {words}: memory is reused, and live tensors keep their values")


def _refused(words: str, error: str) -> Finding:
    return problem(
        "allocator",
        f"the allocator fails {words}: {error}",
        means="every model fails in the same way",
        fix=f"unset {' '.join(ALLOCATOR)}",
    )
