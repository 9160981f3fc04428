"""Plain records of the facts about a machine, which the checks read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from hf_rocm.architectures import KNOWN
from hf_rocm.generation.ledger import Event
from hf_rocm.known_faults import rocm_release
from hf_rocm.overlay.facts import AiterFacts, TorchFacts
from hf_rocm.tools.doctor.machine import CommandResult, Node, System, TaskResult
from hf_rocm.tools.doctor.model import ModelFacts
from hf_rocm.tools.doctor.rocminfo import Agent
from hf_rocm.tools.doctor.transformers import TransformersFacts

AMD, NVIDIA = "0x1002", "0x10de"


@dataclass(frozen=True)
class Driver:
    """The kernel driver.

    cards: PCI vendors of the graphics cards and accelerators. kfd, render: the device files. gpus: the architectures
    that the driver reports, which HSA_OVERRIDE_GFX_VERSION does not change. carved_out, mapped: for an integrated GPU,
    the bytes of memory that the firmware reserved for it, and the bytes of the host's memory that the driver may map.
    dxg: whether the device of WSL's driver exists.
    """

    loaded: bool = False
    version: str | None = None
    kfd: Node | None = None
    render: Mapping[str, Node] = field(default_factory=dict)
    cards: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    dxg: bool = False
    carved_out: int = 0
    mapped: int = 0


@dataclass(frozen=True)
class Rocm:
    """ROCm's user space.

    rocminfo: the outcome of running rocminfo, None if it is not installed. tools: tool → whether it is installed.
    """

    version: str | None = None
    rocminfo: CommandResult | None = None
    agents: tuple[Agent, ...] = ()
    tools: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class JitCache:
    """aiter's cache of compiled modules. modules, locks: file name → time of modification."""

    folder: str
    writable: bool
    modules: Mapping[str, float] = field(default_factory=dict)
    locks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Aiter:
    """The aiter installation.

    installed, torch_installed: when the packages of aiter and torch were written, in seconds since the epoch. rows: the
    number of tuned rows by architecture, such as `gfx942`. result: the outcome of importing aiter in a child process,
    None if that was not tried.
    """

    package: AiterFacts
    cache: JitCache | None = None
    installed: float = 0.0
    torch_installed: float = 0.0
    rows: Mapping[str, int] = field(default_factory=dict)
    result: TaskResult | None = None


@dataclass(frozen=True)
class Host:
    """Settings of the host that matter with several GPUs. numa_balancing, iommu: None if unknown. locked: bytes
    that a process may lock, None if unlimited or unknown. interfaces: network interfaces. networks: InfiniBand and
    RoCE devices. resolves: whether the host name resolves to an address of this host."""

    numa_balancing: bool | None = None
    iommu: str | None = None
    locked: int | None = None
    interfaces: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    resolves: bool | None = None


@dataclass(frozen=True)
class Facts:
    """The facts about one machine.

    shared_memory: the free bytes in /dev/shm. graph_events: replays that differed from uncaptured steps or forwards.
    ledger: the path of the file with these events, None if there is no home folder. bitsandbytes, patch_embedding: the
    outcome of testing them in a child process; None if they were not tested.
    """

    system: System
    groups: tuple[str, ...]
    container: str | None
    wsl: bool
    driver: Driver
    rocm: Rocm
    environment: Mapping[str, str]
    packages: Mapping[str, str]
    torch: TorchFacts
    torch_result: TaskResult
    aiter: Aiter
    transformers: TransformersFacts
    files: Mapping[str, bool] = field(default_factory=dict)
    shared_memory: int | None = None
    host: Host = field(default_factory=Host)
    now: float = 0.0
    model: ModelFacts | None = None
    graph_events: tuple[Event, ...] = ()
    ledger: str | None = None
    bitsandbytes: TaskResult | None = None
    patch_embedding: TaskResult | None = None

    @property
    def devices(self) -> list[Mapping[str, object]]:
        """The GPUs that torch opened."""
        return list(self.torch_result.facts.get("devices", ()))

    @property
    def shares_memory(self) -> Mapping[str, object] | None:
        """The first GPU that torch opened, if it is an AMD GPU that shares the host's memory."""
        if not self.devices or self.torch.hip is None:
            return None
        first = self.devices[0]
        known = KNOWN.get(self.gpus[0] if len(self.gpus) == 1 else str(first["arch"]))
        return first if first.get("integrated") or (known is not None and known.integrated) else None

    @property
    def gpus(self) -> tuple[str, ...]:
        """The architectures of the AMD GPUs, from the driver, else from rocminfo, else from torch."""
        rocm = self.torch.hip is not None
        architectures = self.driver.gpus or tuple(agent.name for agent in self.rocm.agents)
        return architectures or tuple(str(device["arch"]) for device in self.devices if rocm)

    @property
    def rocm_release(self) -> str | None:
        """The ROCm release that torch uses: `7.2.4` if the patch release is known, else `7.2`; None if unknown."""
        built = rocm_release(rocm=self.torch.rocm, torch=self.torch.version, hip=self.torch.hip)
        installed = rocm_release(rocm=self.rocm.version)
        if built and installed and installed.startswith(f"{built}.") and not self.files.get("torch_rocm", True):
            # torch uses the installed libraries.
            return installed
        return built

    @property
    def amd(self) -> bool:
        """Whether there is an AMD GPU, usable or not."""
        return bool(self.gpus) or AMD in self.driver.cards

    @property
    def nvidia(self) -> bool:
        """Whether there is an NVIDIA GPU. Some containers have only its device file."""
        return NVIDIA in self.driver.cards or self.files.get("nvidia_device", False)

    def set(self, name: str) -> str:
        """Return a variable's stripped value; the empty string if the variable is not set."""
        return self.environment.get(name, "").strip()

    def version_of(self, package: str) -> Version | None:
        """Return the version of an installed distribution; None if it is absent or its version can't be parsed."""
        return version(self.packages.get(package))


def short(hip: str) -> str:
    """Shorten a version of HIP or ROCm to its first two numbers: `7.2.26015-4179531dcd` to `7.2`."""
    return ".".join(hip.split("-")[0].split(".")[:2])


def version(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None
