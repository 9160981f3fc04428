"""Known faults by GPU, ROCm release and Linux kernel, with their sources. Does not import torch.

hf_rocm works around them when it records steps and loads models, and `hf-rocm doctor` warns about them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hf_rocm.architectures import KNOWN

Release = tuple[int, ...]


class GraphFault(NamedTuple):
    """One reported fault of graph replay.

    gfx: the affected architectures. first, last: the first and the last ROCm release known to be affected; None: no
    unaffected release is known on that side. nodes: the smallest number of kernel nodes in an affected graph; 0
    for any graph. what: the consequence, one sentence without a full stop. link: the report.
    """

    name: str
    gfx: tuple[str, ...]
    first: Release | None
    last: Release | None
    nodes: int
    what: str
    link: str

    @property
    def releases(self) -> str:
        """The affected releases for use in a sentence, such as `ROCm 7.2.0 to 7.2.3`."""
        if self.first is None or self.last is None:
            return "every ROCm release so far"
        first, last = (".".join(map(str, release)) for release in (self.first, self.last))
        return f"ROCm {first}" if first == last else f"ROCm {first} to {last}"


GRAPH_FAULTS = (
    GraphFault(
        "garbage-in-some-processes",
        ("gfx942",),
        (7, 2, 0),
        (7, 2, 3),
        0,
        "about one process in five replays garbage, while uncaptured runs are correct",
        "https://github.com/ROCm/clr/issues/279",
    ),
    GraphFault(
        "stale-input",
        ("gfx950",),
        (7, 2, 4),
        (7, 2, 4),
        0,
        "a replay can read a buffer as it was before the copy that was enqueued just before it",
        "https://github.com/ROCm/hip/issues/3902",
    ),
    GraphFault(
        "stale-pointers",
        ("gfx1201",),
        None,
        None,
        200,
        "graphs of about 200 or more kernel nodes can read stale device pointers",
        "https://github.com/ROCm/hip/issues/3887",
    ),
)


class MappedCopyFault(NamedTuple):
    """A fault in copies from a mapped file to the GPU. what: the consequence, one sentence without a full stop."""

    name: str
    what: str
    link: str


# Linux kernels on which copies from a mapped file stall: the beginning of `uname -r` → the report.
STALLING_KERNELS = {
    "7.0.0-28": "https://github.com/ROCm/legacy-rocm-build/issues/6523",
    "7.0.12": "https://github.com/ROCm/legacy-rocm-build/issues/6358",
}
SHARED_MEMORY_LINK = "https://github.com/huggingface/transformers/issues/44756"


def mapped_copy_fault(kernel: str, gpus: tuple[str, ...]) -> MappedCopyFault | None:
    """Return the known fault of copying weights to these GPUs directly from a mapped file, or None.

    kernel: the output of `uname -r`. gpus: the architectures of this machine's AMD GPUs.
    """
    if not gpus:
        return None
    for release, link in STALLING_KERNELS.items():
        if re.match(rf"{re.escape(release)}(?!\d)", kernel):
            consequence = f"with Linux {release} the driver stalls for up to a second in such a copy"
            return MappedCopyFault("stalls", consequence, link)
    if all(gfx in KNOWN and KNOWN[gfx].integrated for gfx in gpus):
        names = list(dict.fromkeys(gpus))
        verb = "shares" if len(names) == 1 else "share"
        consequence = (
            f"{' and '.join(names)} {verb} the host's memory, and such copies use twice the memory of the weights"
        )
        return MappedCopyFault("twice", consequence, SHARED_MEMORY_LINK)
    return None


# A third number with more digits is a build number (7.2.26015), not a patch release.
PATCH_DIGITS = 2


def graph_faults(gfx: str | None, rocm: str | None) -> tuple[GraphFault, ...]:
    """Return the faults that may be present on this architecture with this release of ROCm.

    gfx: the name without feature flags, such as `gfx942`. rocm: as `rocm_release` returns it. For an incomplete
    (`7.2`) or unknown release, returns the faults of every release that it might be.
    """
    return tuple(fault for fault in GRAPH_FAULTS if gfx in fault.gfx and _may_be_between(fault, _numbers(rocm)))


def rocm_release(*, rocm: str | None = None, torch: str | None = None, hip: str | None = None) -> str | None:
    """Return the ROCm release that a torch build targets, as precisely as the build states it: `7.2.4`, else `7.2`.

    rocm: `torch.version.rocm`, present since PyTorch 2.10; None in earlier releases. torch: `torch.__version__`, in
    which wheels state it as `2.10.0+rocm7.2.4`. hip: `torch.version.hip`, such as `7.2.26015-4179531dcd`: its third
    number is a build number, and from ROCm 10 on its first two numbers are HIP's own version. Returns None if none of
    them contains a release.
    """
    local = (torch or "").partition("+rocm")[2]
    known = [numbers for numbers in map(_numbers, (rocm, local, hip)) if numbers]
    # among numbers of the same release, the one with a patch number is greater
    exact = max((numbers for numbers in known if numbers[:2] == known[0][:2]), default=())
    return ".".join(map(str, exact)) or None


def _numbers(text: str | None) -> Release:
    """Parse the release in `7.2`, `7.2.3-90`, `7.2.26015-4179531dcd` or `7.2.4.git1a2b`; empty if there is none."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    if match is None:
        return ()
    major, minor, patch = match.groups()
    exact = patch is not None and len(patch) <= PATCH_DIGITS
    return (int(major), int(minor), int(patch)) if exact else (int(major), int(minor))


def _may_be_between(fault: GraphFault, known: Release) -> bool:
    after = fault.first is None or known >= fault.first[: len(known)]
    before = fault.last is None or known <= fault.last[: len(known)]
    return after and before
