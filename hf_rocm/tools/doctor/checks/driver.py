"""Access to the GPU: the driver, its device files, and their permissions."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, problem, warning

DEVICE_FLAGS = "--device=/dev/kfd --device=/dev/dri --security-opt seccomp=unconfined --ipc=host"
# Names under which the host's groups appear in a container that does not map them.
NOBODY = frozenset({"nogroup", "nobody", "65534"})
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def driver(facts: Facts) -> Iterator[Finding]:
    if facts.system.name != "Linux":
        return
    if facts.wsl:
        yield _wsl(facts)
    elif facts.driver.kfd is not None:
        yield _permissions(facts)
    elif facts.amd or facts.driver.loaded:
        yield _no_kfd(facts)
    else:
        yield _no_gpu(facts)
        return
    yield from _hidden(facts)


def _no_gpu(facts: Facts) -> Finding:
    """Report a problem, or only a warning if the user forces the ROCm path without a GPU."""
    summary = "no AMD GPU: " + (
        "this machine has an NVIDIA GPU" if facts.nvidia else "no such card on the PCI bus, no /dev/kfd"
    )
    if facts.set("HF_ROCM_FORCE") == "1":
        return warning(
            "gpu",
            summary,
            means="HF_ROCM_FORCE=1 enables the ROCm path anyway, without aiter: for tests and measurement",
            fix="unset HF_ROCM_FORCE for stock models",
        )
    return problem(
        "gpu",
        summary,
        means="hf_rocm changes nothing here: installed overlays are inert, and models run as in stock transformers",
        fix="nothing is broken; run this on the machine with the AMD GPU"
        + (" (and start the container there)" if facts.container else ""),
    )


def _no_kfd(facts: Facts) -> Finding:
    if facts.container:
        fix = {
            "apptainer": "start it with --rocm (or --bind /dev/kfd,/dev/dri)",
            "kubernetes": "request the resource amd.com/gpu: 1 (AMD's device plugin provides it)",
        }.get(facts.container, f"start it with: {facts.container} run {DEVICE_FLAGS} …")
        return problem(
            "driver",
            f"this machine has an AMD GPU, but this container ({facts.container}) has no /dev/kfd",
            means="the GPU was not passed to the container; torch sees none and runs on the CPU",
            fix=fix,
        )
    if not facts.driver.loaded:
        return problem(
            "driver",
            "this machine has an AMD GPU, but the kernel driver (amdgpu) is not loaded",
            means="nothing can use the GPU",
            fix="sudo modprobe amdgpu; if that fails, install the driver (sudo apt install amdgpu-dkms, from AMD's "
            "repository) and reboot",
        )
    return problem(
        "driver",
        "the driver (amdgpu) is loaded, but there is no /dev/kfd",
        means="this card, or this kernel, has no compute support; graphics may work anyway",
        fix="sudo dmesg | grep -i kfd   # shows why; AMD's amdgpu-dkms adds compute support to older kernels",
    )


def _permissions(facts: Facts) -> Finding:
    kfd, render = facts.driver.kfd, facts.driver.render
    assert kfd is not None
    closed = {path: node for path, node in {"/dev/kfd": kfd, **render}.items() if not node.usable}
    if kfd.usable and not render:
        return problem(
            "driver",
            "/dev/kfd exists, but there is no /dev/dri/renderD*",
            means="the runtime opens both; torch sees no GPU",
            fix=f"start the container with: {DEVICE_FLAGS}"
            if facts.container
            else "sudo dmesg | grep -i amdgpu | tail",
        )
    if kfd.usable and len(closed) < len(render):
        version = f" {facts.driver.version}" if facts.driver.version else ""
        opened = f"{len(render) - len(closed)} of {len(render)}"
        return ok("driver", f"amdgpu{version}; /dev/kfd and {opened} /dev/dri/renderD* can be opened")
    groups = sorted({node.group for node in closed.values()})
    paths = ", ".join(closed)
    if facts.container and NOBODY.intersection(groups):
        fix = "rootless: podman run --group-add keep-groups …, as a user in the host's render group"
    elif facts.container:
        fix = f"start the container with: {' '.join(f'--group-add {number}' for number in _numbers(groups))}"
    else:
        fix = f"sudo usermod -aG {','.join(groups)} $USER, then log in again"
    return problem(
        "driver",
        f"{paths} can't be opened by this user ({kfd.mode or 'mode unknown'}, group {', '.join(groups)})",
        means=f"torch sees no GPU; this user is in {', '.join(facts.groups) or 'no group'}",
        fix=fix,
    )


def _numbers(groups: list[str]) -> list[str]:
    """Return group IDs, or shell expressions for them. Names may differ between host and container, but IDs do not."""
    return [group if group.isdecimal() else f"$(getent group {group} | cut -d: -f3)" for group in groups]


def _wsl(facts: Facts) -> Finding:
    if not facts.driver.dxg:
        return problem(
            "driver",
            "this is WSL, and Windows passes no GPU to it (there is no /dev/dxg)",
            means="torch sees no GPU",
            fix="wsl --update (in Windows), and install AMD's Adrenalin driver with WSL support there; WSL 2 is needed",
        )
    if not facts.rocm.agents and not facts.devices:
        return problem(
            "driver",
            "this is WSL with /dev/dxg, but ROCm finds no GPU through it",
            means="torch sees no GPU",
            fix="sudo amdgpu-install --usecase=wsl,rocm --no-dkms; "
            "with ROCm 7.2 also: export HSA_ENABLE_DXG_DETECTION=1",
        )
    return ok("driver", "WSL: the GPU is reached through /dev/dxg; WSL has no /dev/kfd")


def _hidden(facts: Facts) -> Iterator[Finding]:
    for name in VISIBLE:
        value = facts.environment.get(name)
        if value is None:
            continue
        if value.strip() in ("", "-1") or not any(part.isalnum() for part in value):
            yield problem(
                "visible-devices",
                f"{name}={value!r} hides every GPU",
                means="torch sees none and runs on the CPU",
                fix=f"unset {name}",
            )
        elif name == "CUDA_VISIBLE_DEVICES" and facts.set("HIP_VISIBLE_DEVICES") not in ("", value.strip()):
            yield warning(
                "visible-devices",
                f"CUDA_VISIBLE_DEVICES={value} and HIP_VISIBLE_DEVICES={facts.set('HIP_VISIBLE_DEVICES')} differ",
                means="HIP reads both, and libraries disagree on which one takes precedence",
                fix="unset CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok("visible-devices", f"{name}={value}")
