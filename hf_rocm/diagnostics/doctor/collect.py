"""From a machine to facts: each part is read on its own, and a part that can't be read is a part that isn't there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hf_rocm.architectures import gfx_of_target
from hf_rocm.diagnostics.doctor import aiter, rocminfo
from hf_rocm.diagnostics.doctor.facts import Driver, Facts, Host, Rocm
from hf_rocm.diagnostics.doctor.machine import Machine
from hf_rocm.diagnostics.doctor.model import ModelFacts, model_facts

PCI, KFD_NODES = "/sys/bus/pci/devices", "/sys/class/kfd/kfd/topology/nodes"
DISPLAY, ACCELERATOR = "0x03", "0x12"
TOOL_SECONDS, TORCH_SECONDS = 30.0, 240.0
TOOLS = ("rocminfo", "hipconfig", "hipcc")

Progress = Callable[[str], None]


def collect(machine: Machine, *, model: str | None = None, progress: Progress | None = None) -> Facts:
    """Ask a machine everything. Takes as long as `import torch` and `import aiter` do, beside each other."""
    say = progress or (lambda text: None)
    system = machine.system
    environment = dict(machine.environment)
    say("asking torch and aiter, each in a process of its own")
    with ThreadPoolExecutor(max_workers=3) as pool:
        torch = pool.submit(machine.ask, "torch", timeout=TORCH_SECONDS)
        found_aiter = pool.submit(aiter.collect, machine)
        rocm = pool.submit(_rocm, machine, environment)
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
            model=_model(machine, environment, model) if model else None,
            rocm=rocm.result(),
            torch_answer=torch.result(),
            aiter=found_aiter.result(),
        )


def _driver(machine: Machine) -> Driver:
    render = {f"/dev/dri/{name}": machine.look(f"/dev/dri/{name}") for name in machine.names("/dev/dri")}
    version = machine.text("/sys/module/amdgpu/version")
    return Driver(
        loaded=machine.look("/sys/module/amdgpu") is not None,
        version=version.strip() if version else None,
        kfd=machine.look("/dev/kfd"),
        render={path: node for path, node in render.items() if node and "renderD" in path},
        cards=tuple(_cards(machine)),
        gpus=tuple(_gpus(machine)),
        dxg=machine.look("/dev/dxg") is not None,
    )


def _cards(machine: Machine) -> list[str]:
    found = []
    for name in machine.names(PCI):
        kind = (machine.text(f"{PCI}/{name}/class") or "").strip()
        vendor = (machine.text(f"{PCI}/{name}/vendor") or "").strip()
        if vendor and kind.startswith((DISPLAY, ACCELERATOR)):
            found.append(vendor)
    return found


def _gpus(machine: Machine) -> list[str]:
    found = []
    for name in sorted(machine.names(KFD_NODES), key=lambda each: (len(each), each)):
        match = re.search(r"^gfx_target_version (\d+)$", machine.text(f"{KFD_NODES}/{name}/properties") or "", re.M)
        gfx = gfx_of_target(int(match[1])) if match else None
        if gfx:
            found.append(gfx)
    return found


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
    """The kernel's `iommu=`, empty if it isn't given; None where that says nothing: unread, or Hyper-V's guest."""
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
    """What some packages' folders hold, beside torch's: both builds of each have the same name and version."""
    torch = machine.torch().path
    if torch is None:
        return {}
    site = torch.rpartition("/")[0]
    flash = [f"{site}/{name}" for name in machine.names(site) if name.startswith("flash_attn_2_cuda")]
    return {
        "flash_attn_cuda": any(machine.mentions(path, b"libcudart.so") for path in flash),
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
