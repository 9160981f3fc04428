"""Several GPUs: do they reach each other, and is there something to collect with?"""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.diagnostics.doctor.facts import Facts
from hf_rocm.diagnostics.doctor.report import Finding, ok, warning

GIB = 2**30
SWITCHES = (
    "NCCL_P2P_DISABLE",
    "RCCL_MSCCL_ENABLE",
    "NCCL_DEBUG",
    "HSA_FORCE_FINE_GRAIN_PCIE",
)


def several(facts: Facts) -> Iterator[Finding]:
    peers = facts.torch_answer.facts.get("peers")
    if not facts.torch.hip or not peers:
        return
    count = len(peers)
    cut = [(one, other) for one in range(count) for other in range(count) if not peers[one][other]]
    collectives = facts.torch_answer.facts.get("collectives")
    there = [f"{name}={facts.set(name)}" for name in SWITCHES if facts.set(name)]
    if not collectives:
        yield warning(
            "several",
            f"{count} GPUs, and this torch has no RCCL",
            means="tensor parallelism and data parallel training can't use them together",
            fix="install a torch with RCCL (the wheels of pytorch.org have it)",
        )
    if cut or facts.set("NCCL_P2P_DISABLE") == "1":
        pairs = ", ".join(f"{one}-{other}" for one, other in cut if one < other) or "switched off by NCCL_P2P_DISABLE"
        yield warning(
            "several",
            f"GPUs can't read each other's memory ({pairs})",
            means="what they exchange goes through the host: slow, and with some boards' IOMMU it hangs",
            fix="boot with iommu=pt (BIOS: IOMMU on, ACS off); in a container add --ipc=host; unset NCCL_P2P_DISABLE",
        )
    elif collectives:
        yield ok("several", "; ".join([f"{count} GPUs reach each other", f"RCCL {collectives}", *there]))
    if facts.container and facts.shared_memory is not None and facts.shared_memory < GIB:
        yield warning(
            "several",
            f"/dev/shm of this container has {facts.shared_memory / 2**20:.0f} MiB",
            means="RCCL and data loaders share memory through it, and fail with a bus error when it is full",
            fix="start the container with --ipc=host, or --shm-size 16G",
        )
