"""transformers, the overlays in it, and what else wants to replace parts of its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from hf_rocm.diagnostics.doctor.facts import Facts, version
from hf_rocm.diagnostics.doctor.report import Finding, number, ok, problem, warning

GOOD = ("verified", "compatible")


def transformers(facts: Facts) -> Iterator[Finding]:
    found = facts.transformers
    if found.version is None:
        yield problem(
            "transformers",
            f"transformers can't be found: {found.refused or 'it is not installed'}",
            means="there is nothing to speed up",
            fix=found.hint or "pip install transformers",
        )
        return
    yield _release(facts)
    yield _overlays(facts)
    yield from _kernels(facts)
    yield from _dtype(facts)
    yield from _others(facts)


def _release(facts: Facts) -> Finding:
    found = facts.transformers
    if found.outlook is None:
        return ok("transformers", str(found.version))
    what = f"{found.version} is newer than every release that this hf-rocm was checked with"
    if found.outlook.startswith("go on: "):
        return ok("transformers", f"{what}; {found.outlook}")
    return warning(
        "transformers",
        what,
        means=found.outlook,
        fix="python -m hf_rocm.check_version   # says why, file by file; or pip install --upgrade hf-rocm",
    )


def _overlays(facts: Facts) -> Finding:
    found = facts.transformers
    if found.refused:
        return warning(
            "overlays",
            f"the overlays can't be looked at: {found.refused}",
            means="plain transformers stays stock; hf_rocm.from_pretrained may work all the same",
            fix=found.hint or "hf-rocm status",
        )
    states = {tuple(state.split("/")): count for state, count in found.overlays.items()}
    if not states:
        return warning(
            "overlays",
            f"no overlay is made for transformers {found.version}",
            means="its models stay stock",
            fix="pip install --upgrade hf-rocm, or install a release of transformers that it covers (4.53 to 5.x)",
        )
    bad = _count(states, lambda installed, match: installed == "edited" or (installed != "no" and match not in GOOD))
    old = _count(states, lambda installed, match: installed == "old")
    installed = _count(states, lambda installed, match: installed == "yes" and match in GOOD)
    usable = _count(states, lambda installed, match: match in GOOD)
    if bad:
        return problem(
            "overlays",
            f"{number(bad, 'installed overlay')} on files that were edited or changed since",
            means="those models stay stock, and uninstalling refuses them",
            fix="hf-rocm status   # names them and what to do",
        )
    if old:
        return warning(
            "overlays",
            f"{number(old, 'overlay')} of another hf-rocm release",
            means="they stay inert, and their models stock",
            fix="hf-rocm install-overlays",
        )
    if installed:
        return ok("overlays", f"{installed} of {usable} installed, each on a file that it was made for")
    return ok(
        "overlays",
        f"{usable} match, none installed: hf_rocm.from_pretrained needs none; for AutoModel: hf-rocm install-overlays",
    )


def _count(states: Mapping[tuple[str, ...], int], meant: object) -> int:
    assert callable(meant)
    return sum(count for (installed, match), count in states.items() if meant(installed, match))


def _kernels(facts: Facts) -> Iterator[Finding]:
    """transformers asks for one narrow range of `kernels`, and drops every hub kernel outside of it."""
    here, wanted = facts.version_of("kernels"), facts.transformers.kernels
    if here is None or wanted is None:
        return
    try:
        inside = Requirement(wanted).specifier.contains(here, prereleases=True)
    except InvalidRequirement:
        return
    if inside:
        yield ok("kernels", f"kernels {here}, as transformers {facts.transformers.version} wants it ({wanted})")
        return
    yield warning(
        "kernels",
        f"kernels {here} is outside of what transformers {facts.transformers.version} accepts ({wanted})",
        means="use_kernels=True and kernels from the hub are off or fail; hf_rocm doesn't need them",
        fix=f"pip install '{wanted}' (or pip uninstall kernels)",
    )


def _dtype(facts: Facts) -> Iterator[Finding]:
    here = version(facts.transformers.version)
    if here is not None and here < Version("5"):
        yield warning(
            "dtype",
            f"transformers {here} loads in fp32 unless it is told otherwise",
            means="twice the memory and a fraction of the speed; aiter serves bf16 and fp16 only",
            fix='pass torch_dtype="auto" (or dtype="auto" from 4.56) to from_pretrained',
        )


def _others(facts: Facts) -> Iterator[Finding]:
    """Who wins where several want to replace the same part; each of them was put there by the user."""
    wins = []
    if facts.version_of("kernels"):
        wins.append("use_kernels=True: the hub's kernel wins for the layers that it replaces")
    if facts.packages.get("liger-kernel"):
        wins.append("Liger: its classes win where it is applied (norms, MLPs, losses)")
    if facts.packages.get("unsloth"):
        wins.append("Unsloth: it replaces whole forwards, and those win")
    if wins:
        yield ok("patches", f"{'; '.join(wins)}; hf_rocm serves the rest, and `hf-rocm explain MODEL` names it")
