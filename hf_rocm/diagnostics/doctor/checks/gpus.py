"""Which architectures are here, what each tier is for them, and whether they are passed off as others."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm import __version__
from hf_rocm.architectures import KNOWN, gfx_of_version, tiers
from hf_rocm.diagnostics.doctor.facts import Facts
from hf_rocm.diagnostics.doctor.report import Finding, ok, problem, warning

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def gpus(facts: Facts) -> Iterator[Finding]:
    """What serves each architecture, and how architectures get along with each other."""
    if facts.system.name != "Linux":
        return
    different = tuple(dict.fromkeys(facts.gpus))
    for gfx in different:
        yield _tiers(facts, gfx)
    if len(different) > 1:
        yield _mixed(facts, different)


def _tiers(facts: Facts, gfx: str) -> Finding:
    known = KNOWN.get(gfx)
    built = facts.torch_answer.facts.get("built_for")
    has = {True: "built for it", False: "not built for it"}[gfx in built] if built else "not asked"
    words = "; ".join(f"{tier}: {what}" for tier, what in {**tiers(gfx), "torch": has}.items())
    if known:
        return ok("tiers", f"{gfx} ({known.family}: {known.cards}); {words}")
    return warning(
        "tiers",
        f"{gfx} is an architecture that hf_rocm {__version__} doesn't know; {words}",
        means="PyTorch's own kernels serve its models, and Triton's where their check passes on this machine",
        fix="pip install --upgrade hf-rocm, or report it with the output of `hf-rocm env`",
    )


def _mixed(facts: Facts, different: tuple[str, ...]) -> Finding:
    integrated = [each for each in different if each in KNOWN and KNOWN[each].integrated]
    if integrated and len(integrated) < len(different):
        keep = ",".join(str(index) for index, gfx in enumerate(facts.gpus) if gfx not in integrated)
        why = f"{', '.join(integrated)} is part of the CPU, and torch may pick it, or fail on it"
        hide = f"export HIP_VISIBLE_DEVICES={keep}"
    else:
        keep = ",".join(str(index) for index, gfx in enumerate(facts.gpus) if gfx == different[0])
        why = "kernels are checked and tuned for one architecture; aiter takes one for all of a process's GPUs"
        hide = f"export HIP_VISIBLE_DEVICES={keep}, one kind for each process"
    if facts.set("HIP_VISIBLE_DEVICES") or facts.set("ROCR_VISIBLE_DEVICES"):
        return ok("mixed", f"{' and '.join(different)} side by side; the variables above choose among them")
    return warning("mixed", f"{' and '.join(different)} are side by side in this machine", means=why, fix=hide)


def override(facts: Facts) -> Iterator[Finding]:
    value = facts.set(OVERRIDE)
    if facts.system.name != "Linux" or not value:
        return
    pretended = gfx_of_version(value)
    real = tuple(dict.fromkeys(facts.driver.gpus))
    if pretended is None:
        yield warning(
            "override",
            f"{OVERRIDE}={value} is not of the form 11.0.0",
            means="the runtime ignores it, or fails",
            fix=f"unset {OVERRIDE}",
        )
    elif real and set(real) == {pretended}:
        yield ok("override", f"{OVERRIDE}={value} names what the card is anyway ({pretended}); it can go")
    else:
        yield _pretence(facts, value, pretended, real)


def _pretence(facts: Facts, value: str, pretended: str, real: tuple[str, ...]) -> Finding:
    known = f"{' and '.join(real)} pass{'es' * (len(real) == 1)} for {pretended}"
    what = f"{OVERRIDE}={value}: {known if real else f'every GPU passes for {pretended}'}"
    means = "kernels made for another card run on this one; they can crash or, worse, give wrong numbers"
    if len(facts.gpus) > 1:
        means += "; it holds for all GPUs alike"
    built = facts.torch_answer.facts.get("built_for", ())
    if real and all(each in built for each in real):
        means += f"; this torch was built for {' and '.join(real)} and doesn't need it"
        return problem("override", what, means=means, fix=f"unset {OVERRIDE}")
    return warning(
        "override",
        what,
        means=means,
        fix=f"unset {OVERRIDE}, with a torch that was built for {' and '.join(real) or 'this card'}; "
        "if you must keep it, run `hf-rocm verify MODEL`",
    )
