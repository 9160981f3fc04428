"""The installed transformers, its overlays, and other packages that replace parts of its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from hf_rocm.tools.doctor.facts import Facts, version
from hf_rocm.tools.doctor.report import Finding, ok, pluralized, problem, warning

KERNELS = "https://github.com/huggingface/transformers/issues/47455"
GOOD = ("verified", "compatible")


def transformers(facts: Facts) -> Iterator[Finding]:
    state = facts.transformers
    if state.version is None:
        yield problem(
            "transformers",
            f"transformers cannot be found: {state.refused or 'it is not installed'}",
            means="there is nothing to speed up",
            fix=state.hint or "pip install transformers",
        )
        return
    yield _release(facts)
    yield _overlays(facts)
    yield from _kernels(facts)
    yield from _dtype(facts)
    yield from _others(facts)


def _release(facts: Facts) -> Finding:
    state = facts.transformers
    if state.outlook is None:
        return ok("transformers", str(state.version))
    summary = f"{state.version} is newer than every release that this hf-rocm was checked with"
    if state.outlook.startswith("proceed: "):
        return ok("transformers", f"{summary}; {state.outlook}")
    return warning(
        "transformers",
        summary,
        means=state.outlook,
        fix="python -m hf_rocm.check_version --all   # lists the reason for every file",
    )


def _overlays(facts: Facts) -> Finding:
    state_facts = facts.transformers
    if state_facts.refused:
        return warning(
            "overlays",
            f"the overlays cannot be read: {state_facts.refused}",
            means="models that transformers loads stay stock; hf_rocm.from_pretrained may work anyway",
            fix=state_facts.hint or "hf-rocm status",
        )
    states = {tuple(state.split("/")): count for state, count in state_facts.overlays.items()}
    if not states:
        return warning(
            "overlays",
            f"there is no overlay for transformers {state_facts.version}",
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
            f"{pluralized(bad, 'model')} whose file was edited after the overlay was installed, or does not match it",
            means="such models stay stock, and an overlay in an edited file cannot be uninstalled",
            fix="hf-rocm status   # lists them, and the next step",
        )
    if foreign := _count(states, lambda installed, match: installed == "foreign"):
        return problem(
            "overlays",
            f"{pluralized(foreign, 'block')} with code that is not from this hf-rocm's overlays",
            means="such code runs when the model of its file is imported",
            fix="hf-rocm install-overlays   # replaces it; hf-rocm status names the files",
        )
    if old:
        return warning(
            "overlays",
            f"{pluralized(old, 'overlay')} of another hf-rocm release",
            means="such an overlay is inert, and its model stays stock",
            fix="hf-rocm install-overlays",
        )
    changed = _count(states, lambda installed, match: match == "changed")
    if changed:
        noun = "file differs from its release" if changed == 1 else "files differ from their release"
        return warning(
            "overlays",
            f"{changed} model {noun}; {usable} overlays match, {installed or 'none'} installed",
            means=f"{'its model stays' if changed == 1 else 'their models stay'} stock",
            fix="hf-rocm status   # names what differs",
        )
    if installed:
        return ok("overlays", f"{installed} of {usable} installed, all on matching files")
    return ok(
        "overlays",
        f"{usable} match, none installed: hf_rocm.from_pretrained does not need them; for AutoModel: hf-rocm "
        f"install-overlays",
    )


def _count(states: Mapping[tuple[str, ...], int], predicate: object) -> int:
    assert callable(predicate)
    return sum(count for (installed, match), count in states.items() if predicate(installed, match))


def _kernels(facts: Facts) -> Iterator[Finding]:
    """Check the version of `kernels`: if it is outside a narrow range, transformers uses no Hub kernels."""
    installed, wanted = facts.version_of("kernels"), facts.transformers.kernels
    if installed is None or wanted is None:
        return
    try:
        inside = Requirement(wanted).specifier.contains(installed, prereleases=True)
    except InvalidRequirement:
        return
    if inside:
        yield ok("kernels", f"kernels {installed}, as transformers {facts.transformers.version} requires ({wanted})")
        return
    yield warning(
        "kernels",
        f"kernels {installed} is outside the range of transformers {facts.transformers.version} ({wanted})",
        means="kernels from the Hub are off: use_kernels=True and flash attention from the Hub fail or do nothing, "
        "block-wise FP8 checkpoints can't be loaded, and MXFP4 and GGUF checkpoints are dequantised to 16 bits; "
        "hf_rocm needs no Hub kernels",
        fix=f"pip install '{wanted}' (or pip uninstall kernels)",
        link=KERNELS,
    )


def _dtype(facts: Facts) -> Iterator[Finding]:
    release = version(facts.transformers.version)
    if release is not None and release < Version("5"):
        yield warning(
            "dtype",
            f"transformers {release} loads in fp32 by default",
            means="twice the memory and a fraction of the speed; aiter serves only bf16 and fp16",
            fix='pass torch_dtype="auto" (or dtype="auto" from 4.56) to from_pretrained',
        )


def _others(facts: Facts) -> Iterator[Finding]:
    """Report other packages that replace parts of models. They take precedence, because the user installed them."""
    precedence = []
    if facts.version_of("kernels"):
        precedence.append("use_kernels=True: the Hub's kernels take precedence for the layers that they replace")
    if facts.packages.get("liger-kernel"):
        precedence.append("Liger: its classes take precedence where it is applied (norms, MLPs, losses)")
    if facts.packages.get("unsloth"):
        precedence.append("Unsloth: the forwards that it replaces take precedence")
    if precedence:
        yield ok(
            "patches", f"{'; '.join(precedence)}; hf_rocm accelerates the rest, which `hf-rocm explain MODEL` lists"
        )
