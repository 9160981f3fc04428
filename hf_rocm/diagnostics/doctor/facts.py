"""Everything that the checks may know about a machine, as plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from hf_rocm.diagnostics.doctor.machine import Answer, Node, Ran, System
from hf_rocm.diagnostics.doctor.model import ModelFacts
from hf_rocm.diagnostics.doctor.rocminfo import Agent
from hf_rocm.diagnostics.doctor.transformers import TransformersFacts
from hf_rocm.overlay.facts import AiterFacts, TorchFacts

AMD, NVIDIA = "0x1002", "0x10de"


@dataclass(frozen=True)
class Driver:
    """The kernel's side. cards: PCI vendors of the graphics cards and accelerators; kfd, render: the device files;
    gpus: the architectures that the driver itself names, which no override changes."""

    loaded: bool = False
    version: str | None = None
    kfd: Node | None = None
    render: Mapping[str, Node] = field(default_factory=dict)
    cards: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    dxg: bool = False


@dataclass(frozen=True)
class Rocm:
    """The user space of ROCm. rocminfo: its outcome, None if it is not there; tools: where each of aiter's is there."""

    version: str | None = None
    rocminfo: Ran | None = None
    agents: tuple[Agent, ...] = ()
    tools: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class JitCache:
    """Where aiter keeps what it compiled. modules: compiled files and when; locks: lock files and when."""

    folder: str
    writable: bool
    modules: Mapping[str, float] = field(default_factory=dict)
    locks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Aiter:
    """aiter as it lies there. installed: when its package was written; rows: tuned rows for each GPU, as `gfx942`;
    answer: what a child that imported it said, None if that was not tried."""

    found: AiterFacts
    cache: JitCache | None = None
    installed: float = 0.0
    torch_installed: float = 0.0
    rows: Mapping[str, int] = field(default_factory=dict)
    answer: Answer | None = None


@dataclass(frozen=True)
class Host:
    """What the host of several GPUs is set to. numa_balancing, iommu: None if it can't be read; locked: bytes that a
    process may lock, None for no limit; interfaces: of the network; networks: InfiniBand and RoCE devices; resolves:
    whether its own name leads to an address of its own."""

    numa_balancing: bool | None = None
    iommu: str | None = None
    locked: int | None = None
    interfaces: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    resolves: bool | None = None


@dataclass(frozen=True)
class Facts:
    """One machine."""

    system: System
    groups: tuple[str, ...]
    container: str | None
    wsl: bool
    driver: Driver
    rocm: Rocm
    environment: Mapping[str, str]
    packages: Mapping[str, str]
    torch: TorchFacts
    torch_answer: Answer
    aiter: Aiter
    transformers: TransformersFacts
    files: Mapping[str, bool] = field(default_factory=dict)
    shared_memory: int | None = None
    host: Host = field(default_factory=Host)
    now: float = 0.0
    model: ModelFacts | None = None

    @property
    def devices(self) -> list[Mapping[str, object]]:
        """The GPUs that torch opened."""
        return list(self.torch_answer.facts.get("devices", ()))

    @property
    def gpus(self) -> tuple[str, ...]:
        """The architectures of the AMD GPUs: as the driver names them, else as rocminfo or torch does."""
        rocm = self.torch.hip is not None
        seen = self.driver.gpus or tuple(agent.name for agent in self.rocm.agents)
        return seen or tuple(str(each["arch"]) for each in self.devices if rocm)

    @property
    def amd(self) -> bool:
        """Whether there is an AMD GPU, usable or not."""
        return bool(self.gpus) or AMD in self.driver.cards

    @property
    def nvidia(self) -> bool:
        return NVIDIA in self.driver.cards

    def set(self, name: str) -> str:
        """A variable's value without blanks, or nothing."""
        return self.environment.get(name, "").strip()

    def version_of(self, package: str) -> Version | None:
        """The version of an installed distribution, None if it is absent or has no readable one."""
        return version(self.packages.get(package))


def short(hip: str) -> str:
    """`7.2.26015-4179531dcd`, as torch names its ROCm, to `7.2`."""
    return ".".join(hip.split("-")[0].split(".")[:2])


def version(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None
