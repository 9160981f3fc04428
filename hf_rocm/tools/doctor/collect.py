"""Collect the facts about a machine. A fact that can't be read counts as absent, and all other facts are still read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hf_rocm.architectures import KFD_NODES, driver_version, gfx_of_node, least_of_cards
from hf_rocm.tools.doctor import aiter, rocminfo
from hf_rocm.tools.doctor.facts import Driver, Facts, Host, Rocm
from hf_rocm.tools.doctor.machine import Machine, TaskResult
from hf_rocm.tools.doctor.model import ModelFacts, model_facts

PCI = "/sys/bus/pci/devices"
DISPLAY, ACCELERATOR = "0x03", "0x12"
TOOL_SECONDS, TORCH_SECONDS, KERNEL_SECONDS = 30.0, 240.0, 120.0
TOOLS = ("rocminfo", "hipconfig", "hipcc")

Progress = Callable[[str], None]


def collect(machine: Machine, *, model: str | None = None, progress: Progress | None = None) -> Facts:
    """Collect all facts. `import torch` and `import aiter` take most of the time, and run in parallel.

    torch is imported only if it was built for ROCm, since other builds can't use an AMD GPU; aiter is imported only if
    its core module is already compiled.
    """
    system = machine.system
    environment = dict(machine.environment)
    if progress is not None:
        progress("importing torch and aiter, each in its own process")
    named = _model(machine, environment, model) if model else None
    with ThreadPoolExecutor(max_workers=3) as pool:
        torch = pool.submit(machine.run_task, "torch", timeout=TORCH_SECONDS) if machine.torch().hip else None
        aiter_task = pool.submit(aiter.collect, machine)
        rocm = pool.submit(_rocm, machine, environment)
        result = torch.result() if torch else TaskResult()
        usable = bool(machine.torch().hip and result.facts.get("devices") and not result.error)
        return Facts(
            system=system,
            groups=machine.groups,
            container=_container(machine, environment),
            wsl=system.name == "Linux" and "microsoft" in system.release.lower(),
            driver=_driver(machine),
            environment=environment,
            packages=machine.packages(),
            torch=machine.torch(),
            files=_files(machine),
            transformers=machine.transformers(),
            shared_memory=machine.free_bytes("/dev/shm"),
            host=_host(machine),
            now=time.time(),
            model=named,
            rocm=rocm.result(),
            torch_result=result,
            aiter=aiter_task.result(),
            graph_events=machine.graph_events(),
            ledger=machine.ledger(),
            bitsandbytes=_run_if(usable and "bitsandbytes" in machine.packages(), machine, "bitsandbytes"),
            patch_embedding=_run_if(usable and named is not None and named.conv3d, machine, "patch-embedding"),
        )


def _run_if(wanted: bool, machine: Machine, task: str) -> TaskResult | None:
    return machine.run_task(task, timeout=KERNEL_SECONDS) if wanted else None


def _driver(machine: Machine) -> Driver:
    render = {f"/dev/dri/{name}": machine.look(f"/dev/dri/{name}") for name in machine.names("/dev/dri")}
    return Driver(
        loaded=machine.look("/sys/module/amdgpu") is not None,
        version=driver_version(machine.text),
        kfd=machine.look("/dev/kfd"),
        render={path: node for path, node in render.items() if node and "renderD" in path},
        cards=tuple(_cards(machine)),
        gpus=tuple(_gpus(machine)),
        dxg=machine.look("/dev/dxg") is not None,
        carved_out=least_of_cards(machine.text(f"{PCI}/{name}/mem_info_vram_total") for name in machine.names(PCI)),
        mapped=least_of_cards(machine.text(f"{PCI}/{name}/mem_info_gtt_total") for name in machine.names(PCI)),
    )


def _cards(machine: Machine) -> list[str]:
    cards = []
    for name in machine.names(PCI):
        kind = (machine.text(f"{PCI}/{name}/class") or "").strip()
        vendor = (machine.text(f"{PCI}/{name}/vendor") or "").strip()
        if vendor and kind.startswith((DISPLAY, ACCELERATOR)):
            cards.append(vendor)
    return cards


def _gpus(machine: Machine) -> list[str]:
    nodes = sorted(machine.names(KFD_NODES), key=lambda name: (len(name), name))
    architectures = (gfx_of_node(machine.text(f"{KFD_NODES}/{node}/properties") or "") for node in nodes)
    return [gfx for gfx in architectures if gfx]


def _rocm(machine: Machine, environment: dict[str, str]) -> Rocm:
    roots = [environment.get("ROCM_PATH", ""), environment.get("ROCM_HOME", ""), "/opt/rocm"]
    texts = (machine.text(f"{root}/.info/version") for root in roots if root)
    version = next((text.strip() for text in texts if text), None)
    ran = machine.run("rocminfo", timeout=TOOL_SECONDS)
    tools = {name: machine.run(name, "--version", timeout=TOOL_SECONDS) is not None for name in TOOLS[1:]}
    return Rocm(
        version=version.split("-")[0] if version else None,
        rocminfo=ran,
        agents=rocminfo.agents(ran.out) if ran else (),
        tools={"rocminfo": ran is not None, **tools},
    )


def _host(machine: Machine) -> Host:
    balancing = (machine.text("/proc/sys/kernel/numa_balancing") or "").strip()
    locked = re.search(r"^Max locked memory\s+(\S+)", machine.text("/proc/self/limits") or "", re.MULTILINE)
    return Host(
        numa_balancing=balancing != "0" if balancing else None,
        iommu=_iommu(machine),
        locked=int(locked[1]) if locked and locked[1].isdecimal() else None,
        interfaces=machine.names("/sys/class/net"),
        networks=machine.names("/sys/class/infiniband"),
        resolves=machine.resolves(),
    )


def _iommu(machine: Machine) -> str | None:
    """Return the kernel's `iommu=` parameter, empty if not set; None if unreadable, or in a Hyper-V guest."""
    line = machine.text("/proc/cmdline")
    bios = machine.text("/sys/devices/virtual/dmi/id/bios_version") or ""
    if line is None or bios.startswith("Hyper-V"):
        return None
    values = [word.removeprefix("iommu=") for word in line.split() if word.startswith("iommu=")]
    return ",".join(values)


def _container(machine: Machine, environment: dict[str, str]) -> str | None:
    if machine.look("/run/.containerenv"):
        return "podman"
    if machine.look("/.dockerenv"):
        return "docker"
    control = machine.text("/proc/1/cgroup") or ""
    if "kubepods" in control or "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environment or "SINGULARITY_CONTAINER" in environment:
        return "apptainer"
    return "docker" if "docker" in control else None


def _files(machine: Machine) -> dict[str, bool]:
    """Detect an NVIDIA GPU by its device file, and the installed builds of packages by their files.

    Different builds of a package can have the same name and version.
    """
    nvidia = {"nvidia_device": machine.look("/dev/nvidiactl") is not None}
    torch = machine.torch().path
    if torch is None:
        return nvidia
    site = torch.rpartition("/")[0]
    flash = [f"{site}/{name}" for name in machine.names(site) if name.startswith("flash_attn_2_cuda")]
    return {
        **nvidia,
        "flash_attn_cuda": any(machine.mentions(path, b"libcudart.so") for path in flash),
        "torch_rocm": any(name.startswith("libamdhip64") for name in machine.names(f"{torch}/lib")),
        "bitsandbytes_rocm": any(
            name.startswith(("libbitsandbytes_rocm", "libbitsandbytes_hip"))
            for name in machine.names(f"{site}/bitsandbytes")
        ),
    }


def _model(machine: Machine, environment: dict[str, str], name: str) -> ModelFacts:
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"
    match = re.search(r"^MemAvailable:\s+(\d+) kB", machine.text("/proc/meminfo") or "", re.MULTILINE)
    return model_facts(name, cache=Path(cache), memory=int(match[1]) * 1024 if match else None)
