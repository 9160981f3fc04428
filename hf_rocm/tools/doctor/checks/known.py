"""Known faults of machines like this one: one rule per fault, with a link to its report, and the fix.

A rule that does not apply is listed only with `--all`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from hf_rocm.generation.ledger import NAME, Event
from hf_rocm.known_faults import GRAPH_FAULTS, STALLING_KERNELS, graph_faults, mapped_copy_fault
from hf_rocm.tools.doctor.checks.torch import INDEXES, install
from hf_rocm.tools.doctor.facts import Facts, version
from hf_rocm.tools.doctor.report import Finding, ok, pluralized, problem, warning

BACKWARD = "https://github.com/ROCm/TheRock/issues/7696"
FOUR_BIT = "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2087"
CONV3D = "https://github.com/Comfy-Org/ComfyUI/issues/15895"
ROPE = (
    "https://github.com/huggingface/kernels-community/blob/fe12b7b485c167eff1764dc9c173958bd2a23e45/"
    "aiter-rope/torch-ext/aiter_rope/layers.py"
)
SINKS = "https://github.com/huggingface/kernels-community/pull/992"
PADDED_ROWS = "https://github.com/unslothai/unsloth/pull/9848"

# The newest version of the Hub's rotary kernel that is known to use the first row's positions for every row.
ROPE_OF_ONE_ROW = 2
# From this major release of transformers on, masks are never corrected for rows without a visible key.
MASKS_UNCORRECTED = 5
# A Conv3d is slow if it takes more than SLOWER times as long as the equivalent GEMM and more than NOTICEABLE seconds.
SLOWER, NOTICEABLE = 20.0, 0.2


class Rule(NamedTuple):
    """A reported fault.

    name: the name of its check. topic: the description that is listed if the rule yields no finding. link: the URL of
    the report. find: a function that yields the findings for a machine.
    """

    name: str
    topic: str
    link: str
    find: Callable[[Facts], Iterator[Finding]]


def known(facts: Facts) -> Iterator[Finding]:
    """Apply every rule, on Linux with an AMD GPU."""
    if facts.system.name != "Linux" or not facts.amd:
        return
    for rule in RULES:
        applied = list(rule.find(facts))
        yield from applied
        if not applied:
            yield ok(rule.name, f"not here: {rule.topic}", link=rule.link, shown=False)


def _graphs(facts: Facts) -> Iterator[Finding]:
    """Check for releases of ROCm whose graph replays return wrong results."""
    if not facts.torch.hip:
        return
    release = facts.rocm_release
    for gfx in dict.fromkeys(facts.gpus):
        for fault in graph_faults(gfx, release):
            platform = f"ROCm {release}" if release else "an unknown release of ROCm"
            reported = f" (reported for {fault.releases})" if fault.first is not None else ""
            if facts.set("HF_ROCM_GRAPHS") == "0":
                yield ok(
                    "graphs", f"{platform} on {gfx}: {fault.what}{reported}; no steps are recorded (HF_ROCM_GRAPHS=0)"
                )
                continue
            yield warning(
                "graphs",
                f"{platform} on {gfx}: {fault.what}{reported}",
                means="torch.compile's reduce-overhead and vLLM replay graphs without checking the results; hf_rocm "
                "records no graphs here unless HF_ROCM_GRAPHS=1 requires them, and compares some replays with "
                "uncaptured calls",
                fix=_without_fault(gfx),
                link=fault.link,
            )


def graph_events(facts: Facts) -> Iterator[Finding]:
    """Report the replays on this machine that differed from uncaptured steps or forwards.

    An event with both a different torch and a different amdgpu driver causes no warning, because the fault is in torch
    or in the driver.
    """
    matching = [event for event in facts.graph_events if _concerns(event, facts)]
    others = [event for event in facts.graph_events if event not in matching]
    if matching:
        yield warning(
            "graph-events",
            f"{pluralized(len(matching), 'replay')} differed from the uncaptured step on this machine; "
            f"the last one was {matching[-1]}",
            means="hf_rocm stopped recording steps in that process; other users of HIP graphs would not notice such a "
            "replay",
            fix=_compared_again(facts, matching[-1]),
        )
    elif others:
        releases = ", ".join(dict.fromkeys(event.torch for event in others))
        yield ok(
            "graph-events",
            f"no replay differed from the uncaptured step with this torch; {len(others)} did with torch {releases}",
        )


def _concerns(event: Event, facts: Facts) -> bool:
    """Return whether the event was recorded with the installed torch or, on ROCm, with the loaded amdgpu driver."""
    same_driver = event.rocm is not None and facts.driver.loaded and event.driver == facts.driver.version
    return same_driver or event.torch == facts.torch.version


def _compared_again(facts: Facts, event: Event) -> str:
    """Return the command that compares the event's model again, if there is a GPU, and how to delete the events."""
    path = shlex.quote(facts.ledger or NAME)
    rocm = bool(facts.torch.hip and facts.amd)
    if rocm or (facts.torch.cuda and facts.nvidia):
        command = event.command(force=not rocm)
        return f"{command}   # compares again; HF_ROCM_GRAPHS=0 disables recording; to delete the events: rm {path}"
    return f"rm {path}   # deletes the events; without a GPU, they can't be compared again"


def _without_fault(gfx: str) -> str:
    index = next((release for release in INDEXES if not graph_faults(gfx, release)), None)
    disable = "export HF_ROCM_GRAPHS=0   # records nothing, which is the default here, and silences this warning"
    return f"{install(gfx)}; or {disable}" if index else disable


def _mapped_copies(facts: Facts) -> Iterator[Finding]:
    """Check for copies from a mapped file to the GPU that stall or use twice the memory."""
    fault = mapped_copy_fault(facts.system.release, facts.gpus)
    if fault is None:
        return
    if fault.name == "twice":
        yield ok(
            "mapped-copies",
            f"copies from a mapped file to the GPU: {fault.what}; hf_rocm.from_pretrained copies weights through "
            "ordinary memory here",
            link=fault.link,
        )
        return
    yield warning(
        "mapped-copies",
        f"copies from a mapped file to the GPU: {fault.what}",
        means="plain transformers takes minutes to load a model; hf_rocm.from_pretrained avoids such copies and copies "
        "weights through ordinary memory",
        fix="boot another Linux kernel; until then, load models with hf_rocm.from_pretrained",
        link=fault.link,
    )


def _four_bit(facts: Facts) -> Iterator[Finding]:
    """Check for wrong results in bitsandbytes' GEMMs with 4-bit weights."""
    result = facts.bitsandbytes
    if result is None:
        return
    installed = facts.packages.get("bitsandbytes", "")
    wrong = {gpu: reason for gpu, reason in dict(result.facts.get("gemms", {})).items() if reason}
    gpus = [str(device["arch"]) for device in facts.devices]
    if result.error:
        yield problem(
            "bitsandbytes",
            f"bitsandbytes {installed} failed during {result.stage}: {result.error}",
            means="loading 4-bit models through it fails as well",
            fix="pip install --upgrade bitsandbytes, or pass quantize= to hf_rocm.from_pretrained instead",
            link=FOUR_BIT,
        )
    elif wrong:
        gpu_faults = "; ".join(f"GPU {gpu} ({gpus[int(gpu)]}): {reason}" for gpu, reason in wrong.items())
        arches = ";".join(dict.fromkeys(gpus[int(gpu)] for gpu in wrong))
        yield problem(
            "bitsandbytes",
            f"bitsandbytes {installed} computes wrong results with 4-bit weights: {gpu_faults}",
            means="its 4-bit models generate garbage, and no error is raised",
            fix=f"build it from source with -DCOMPUTE_BACKEND=hip -DBNB_ROCM_ARCH={arches}, "
            "or pass quantize= to hf_rocm.from_pretrained instead",
            link=FOUR_BIT,
        )
    elif result.facts.get("gemms"):
        yield ok("bitsandbytes", f"bitsandbytes {installed}: GEMMs with NF4 weights are correct, for 1 and for 8 rows")


def _conv3d(facts: Facts) -> Iterator[Finding]:
    """Check the speed of MIOpen's Conv3d if the named model embeds images with it."""
    result, named = facts.patch_embedding, facts.model
    if result is None or named is None:
        return
    fix = "use hf_rocm.from_pretrained or hf_rocm.prepare(model), which compute it as a GEMM"
    if result.error:
        yield problem(
            "patch-embedding",
            f"{named.name} embeds images with a Conv3d, which failed here: {result.error}",
            means="the model fails at its first image; MIOpen computes Conv3d, and aborts on several GPUs and releases",
            fix=fix,
            link=CONV3D,
        )
        return
    for gpu, times in dict(result.facts.get("seconds", {})).items():
        convolution, gemm = times
        words = f"a patch embedding takes {convolution * 1e3:.1f} ms as a Conv3d, and {gemm * 1e3:.1f} ms as a GEMM"
        if convolution > NOTICEABLE and convolution > SLOWER * gemm:
            yield warning(
                "patch-embedding",
                f"GPU {gpu}: {words}",
                means=f"{named.name} computes this Conv3d for every image",
                fix=fix,
                link=CONV3D,
            )
        else:
            yield ok("patch-embedding", f"GPU {gpu}: {words}")


def _backward(facts: Facts) -> Iterator[Finding]:
    """Check for ROCm 10 on gfx950, where AOTriton's backward kernel is slower."""
    release = version(facts.rocm_release)
    if "gfx950" not in facts.gpus or release is None or release.major != 10:
        return
    yield warning(
        "backward",
        f"ROCm {release} on gfx950: AOTriton 0.13b selects a slower backward kernel for SDPA",
        means="training of several Hugging Face models was 9 to 25 % slower than before; inference is not affected",
        fix="for training, use a torch that was built with AOTriton 0.11.2b, or one for ROCm 7",
        link=BACKWARD,
    )


def _rope(facts: Facts) -> Iterator[Finding]:
    """Check for versions of the Hub's rotary kernel that apply the first row's positions to all rows."""
    pinned = facts.transformers.hub_rope
    if pinned is None or pinned > ROPE_OF_ONE_ROW or not hub_is_on(facts):
        return
    yield warning(
        "hub-rope",
        f"with use_kernels=True, transformers {facts.transformers.version} uses aiter-rope v{pinned}",
        means="it applies the first row's positions to all rows: if the first row is padded, the results of the batch "
        "are wrong, and no error is raised",
        fix="load without use_kernels=True (hf_rocm has its own rotary kernel); `hf-rocm verify MODEL` detects this",
        link=ROPE,
    )


def _sinks(facts: Facts) -> Iterator[Finding]:
    """Check for the Hub's flash attention, which may be called without the attention sinks of a model."""
    if not facts.transformers.hub_flash or not hub_is_on(facts):
        return
    named = facts.model
    concerned = f" ({named.name} has sinks)" if named is not None and named.sinks else ""
    yield warning(
        "hub-flash",
        f"transformers {facts.transformers.version} loads flash_attention_2 and _3 from the Hub (aiter-flash-attn) on "
        f"ROCm, and may call it without attention sinks{concerned}",
        means="its parameter is called `sink`, and arguments with other names are dropped: gpt-oss then runs without "
        "sinks, and no error is raised",
        fix="keep sdpa for models with sinks; `hf-rocm verify MODEL` detects this",
        link=SINKS,
    )


def _padded_rows(facts: Facts) -> Iterator[Finding]:
    """Check for a float16 model in transformers ≥ 5: left-padded query rows without a visible key can become NaN."""
    named = facts.model
    release = version(facts.transformers.version)
    if named is None or named.dtype != "float16" or release is None or release.major < MASKS_UNCORRECTED:
        return
    yield warning(
        "padded-rows",
        f"{named.name} is in float16, in which padding tokens without a visible key can become NaN",
        means="the NaNs spread through a left-padded row, whose text then ends immediately",
        fix='load it with dtype="bfloat16", or batch only rows of equal length; `hf-rocm verify MODEL` detects this',
        link=PADDED_ROWS,
    )


def hub_is_on(facts: Facts) -> bool:
    """Return whether Hub kernels can be used: `kernels` is installed, in a version that transformers accepts."""
    installed, wanted = facts.version_of("kernels"), facts.transformers.kernels
    try:
        return (
            installed is not None
            and wanted is not None
            and Requirement(wanted).specifier.contains(installed, prereleases=True)
        )
    except InvalidRequirement:
        return False


RULES = (
    Rule("graphs", "a GPU and a ROCm release whose graph replays return wrong results", GRAPH_FAULTS[0].link, _graphs),
    Rule("mapped-copies", "slow copies from mapped files", next(iter(STALLING_KERNELS.values())), _mapped_copies),
    Rule("bitsandbytes", "wrong 4-bit GEMMs of bitsandbytes", FOUR_BIT, _four_bit),
    Rule("patch-embedding", "a named model whose images go through MIOpen's Conv3d", CONV3D, _conv3d),
    Rule("backward", "a slower backward kernel of SDPA (gfx950, ROCm 10)", BACKWARD, _backward),
    Rule("hub-rope", "a Hub kernel that rotates all rows by the first row's positions", ROPE, _rope),
    Rule("hub-flash", "flash attention from the Hub without sinks", SINKS, _sinks),
    Rule("padded-rows", "a named model in float16, where padded rows can become NaN", PADDED_ROWS, _padded_rows),
)
