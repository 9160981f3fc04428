"""Several GPUs: peer access between them, torch's RCCL, the host's settings, and the ranks' variables.

The checks are based on RCCL's warnings at startup, which RCCL logs only with NCCL_DEBUG=WARN or a more
detailed level, and on the recommendations for the variables in RCCL's and NCCL's documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from hf_rocm.tools.doctor.checks.ranks import ranks
from hf_rocm.tools.doctor.facts import Facts, version
from hf_rocm.tools.doctor.report import Finding, ok, warning

GIB = 2**30
SWITCHES = (
    "NCCL_DEBUG",
    "NCCL_MIN_NCHANNELS",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "HSA_FORCE_FINE_GRAIN_PCIE",
    "HSA_NO_SCRATCH_RECLAIM",
    "RCCL_MSCCL_ENABLE",
    "RCCL_MSCCL_FORCE_ENABLE",
)
# Variables that NCCL's documentation recommends only for debugging → their effect.
DEBUG_ONLY = {
    "NCCL_SHM_DISABLE": "GPUs that cannot read each other's memory exchange data through the network instead of host "
    "memory",
    "NCCL_IB_DISABLE": "machines exchange data through plain sockets",
}
PINNED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
LOCKED = 64 * 2**20


def several(facts: Facts) -> Iterator[Finding]:
    yield from ranks(facts)
    peers = facts.torch_result.facts.get("peers")
    if not facts.torch.hip or not peers:
        return
    yield from _reach(facts, peers)
    yield from _library(facts)
    yield from _switches(facts)
    yield from _host(facts, len(peers))


def _reach(facts: Facts, peers: list[list[bool]]) -> Iterator[Finding]:
    count = len(peers)
    unreachable = [(i, j) for i, j in combinations(range(count), 2) if not (peers[i][j] and peers[j][i])]
    collectives = facts.torch_result.facts.get("collectives")
    switches = [f"{name}={facts.set(name)}" for name in SWITCHES if facts.set(name)]
    if not collectives:
        yield warning(
            "several",
            f"{count} GPUs, but this torch has no RCCL",
            means="tensor parallelism and data parallel training cannot use them",
            fix="install a torch with RCCL (the wheels of pytorch.org have it)",
        )
    if unreachable or facts.set("NCCL_P2P_DISABLE") == "1":
        pairs = ", ".join(f"{one}-{other}" for one, other in unreachable) or "switched off by NCCL_P2P_DISABLE"
        fine_grain = "" if facts.set("HSA_FORCE_FINE_GRAIN_PCIE") == "1" else "; over PCIe: HSA_FORCE_FINE_GRAIN_PCIE=1"
        yield warning(
            "several",
            f"GPUs cannot read each other's memory ({pairs})",
            means="data goes through the host: slow, and it hangs with the IOMMU of some boards",
            fix="boot with iommu=pt (BIOS: IOMMU on, ACS off); in a container add --ipc=host; unset NCCL_P2P_DISABLE"
            + fine_grain,
        )
    elif collectives:
        yield ok("several", "; ".join([f"{count} GPUs can read each other's memory", f"RCCL {collectives}", *switches]))
    if facts.container and facts.shared_memory is not None and facts.shared_memory < GIB:
        yield warning(
            "several",
            f"/dev/shm of this container has {facts.shared_memory / 2**20:.0f} MiB free",
            means="RCCL and data loaders share memory through it, and fail with a bus error when it is full",
            fix="start the container with --ipc=host, or --shm-size 16G",
        )


def _library(facts: Facts) -> Iterator[Finding]:
    """Warn if the major or minor version of the loaded RCCL differs from the one that torch was built with."""
    built, loaded = facts.torch_result.facts.get("collectives"), facts.torch_result.facts.get("collectives_loaded")
    if not built or not loaded:
        return
    one, other = version(built), version(loaded["version"])
    if one is not None and other is not None and one.release[:2] != other.release[:2]:
        yield warning(
            "several",
            f"this torch was built with RCCL {built}, and {loaded['path']} is {loaded['version']}",
            means="the loader finds another ROCm's library first; collectives may fail or hang",
            fix="remove its folder from LD_LIBRARY_PATH, and the file from LD_PRELOAD",
        )


def _switches(facts: Facts) -> Iterator[Finding]:
    active = {name: means for name, means in DEBUG_ONLY.items() if facts.set(name) not in ("", "0")}
    if active:
        yield warning(
            "several",
            ", ".join(f"{name}={facts.set(name)}" for name in active),
            means="; ".join(active.values()) + ": much slower, and meant for debugging",
            fix=f"unset {' '.join(active)}",
        )
    pinned = [name for name in PINNED if facts.set(name)]
    if pinned:
        yield warning(
            "several",
            ", ".join(f"{name}={facts.set(name)}" for name in pinned),
            means="RCCL selects these by message size and topology; with fixed values most sizes are slower",
            fix=f"unset {' '.join(pinned)}, unless you measured that they help",
        )
    if facts.set("NCCL_DEBUG").upper() in ("INFO", "TRACE"):
        yield warning(
            "several",
            f"NCCL_DEBUG={facts.set('NCCL_DEBUG')}",
            means="RCCL logs every operation, on every rank",
            fix="export NCCL_DEBUG=WARN",
        )


def _host(facts: Facts, count: int) -> Iterator[Finding]:
    host = facts.host
    if host.numa_balancing:
        yield warning(
            "several",
            "the kernel moves memory between NUMA nodes (kernel.numa_balancing is on)",
            means="GPUs wait while shared pages are moved; RCCL warns about this when it starts",
            fix="sudo sysctl kernel.numa_balancing=0",
        )
    if host.iommu is not None and "pt" not in host.iommu.split(",") and "cray" not in facts.system.release:
        yield warning(
            "several",
            f"{count} GPUs, but the kernel was started without iommu=pt",
            means="RCCL warns that transfers may become unstable or hang",
            fix="add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), then reboot",
        )
    if host.networks and host.locked is not None and host.locked < LOCKED:
        yield warning(
            "several",
            f"{', '.join(host.networks)}, but a process may lock only {host.locked / 2**10:.0f} KiB of memory",
            means="InfiniBand and RoCE need locked memory; transfers between machines fail to start",
            fix="ulimit -l unlimited (in a container: --ulimit memlock=-1)",
        )
