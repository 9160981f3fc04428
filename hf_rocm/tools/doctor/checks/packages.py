"""Packages for NVIDIA GPUs, and their effect on a machine with AMD GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, warning

# package → the problem and the alternative
NVIDIA_ONLY = {
    "transformer-engine": ("its kernels are for CUDA", "pip uninstall transformer-engine; AMD has its own build"),
    "xformers": ("builds from PyPI are for CUDA", "pip uninstall xformers; SDPA replaces it"),
    "tensorrt": ("it runs only on NVIDIA GPUs", "MIGraphX is AMD's counterpart"),
    "tensorrt-llm": ("it runs only on NVIDIA GPUs", "vLLM and SGLang have ROCm builds"),
    "cupy-cuda12x": ("it is built for CUDA", "pip uninstall cupy-cuda12x; CuPy has ROCm builds"),
    "cupy-cuda11x": ("it is built for CUDA", "pip uninstall cupy-cuda11x; CuPy has ROCm builds"),
    "jax-cuda12-plugin": ("it looks for CUDA", "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt; ROCm has plugins too"),
    "deep-ep": ("it needs NVSHMEM", "leave expert parallelism to RCCL"),
    "nvidia-dali-cuda120": ("it is built for CUDA", "rocAL is AMD's counterpart"),
}
MANAGEMENT = ("pynvml", "nvidia-ml-py")
BITSANDBYTES_ROCM = Version("0.50")


def packages(facts: Facts) -> Iterator[Finding]:
    if not facts.amd:
        return
    warnings = list(_warnings(facts))
    yield from warnings
    if not warnings:
        yield ok("packages", "none that are made only for NVIDIA GPUs")


def _warnings(facts: Facts) -> Iterator[Finding]:
    yield from _flash_attn(facts)
    yield from _bitsandbytes(facts)
    for name in MANAGEMENT:
        if facts.packages.get(name):
            yield warning(
                "packages",
                f"{name} {facts.packages[name]} is installed",
                means="it can be imported, but nvmlInit fails here, so code that uses it sees no GPU",
                fix="use hf_rocm.gpu_available() instead (amdsmi is AMD's counterpart)",
            )
    for name, (reason, alternative) in NVIDIA_ONLY.items():
        if facts.packages.get(name):
            yield warning("packages", f"{name} {facts.packages[name]} is installed", means=reason, fix=alternative)
    yield from _leftovers(facts)


def _flash_attn(facts: Facts) -> Iterator[Finding]:
    installed = facts.packages.get("flash-attn")
    if installed and facts.files.get("flash_attn_cuda"):
        yield warning(
            "packages",
            f"flash-attn {installed} is a CUDA build",
            means='importing it fails without libcudart, and so does attn_implementation="flash_attention_2"',
            fix="pip uninstall flash-attn; SDPA and hf_rocm's attention don't need it",
        )


def _bitsandbytes(facts: Facts) -> Iterator[Finding]:
    installed = facts.version_of("bitsandbytes")
    if installed is None:
        return
    if not facts.files.get("bitsandbytes_rocm", True):
        yield warning(
            "packages",
            f"bitsandbytes {installed} has no library for ROCm",
            means="4-bit and 8-bit loading through it fails",
            fix=f"pip install --upgrade 'bitsandbytes>={BITSANDBYTES_ROCM}' "
            "(or pass quantize= to hf_rocm.from_pretrained)",
        )
    elif installed < BITSANDBYTES_ROCM and facts.bitsandbytes is None:
        # The GEMMs of bitsandbytes were not run.
        yield warning(
            "packages",
            f"bitsandbytes {installed} is older than {BITSANDBYTES_ROCM}",
            means="4-bit layers of older builds returned NaN or crashed on several AMD GPUs",
            fix=f"pip install --upgrade 'bitsandbytes>={BITSANDBYTES_ROCM}'",
        )


def _leftovers(facts: Facts) -> Iterator[Finding]:
    """Report the CUDA libraries of another build of torch, which are harmless but take up gigabytes."""
    left = [
        name for name in facts.packages if name.startswith("nvidia-") and name.endswith(("-cu11", "-cu12", "-cu13"))
    ]
    if left and facts.torch.hip:
        yield warning(
            "packages",
            f"CUDA libraries of another build of torch are still installed: {len(left)} (nvidia-…)",
            means="they take up gigabytes and are not used; a CUDA build of torch was probably installed here before",
            fix="pip list | grep -oE '^nvidia-[^ ]+' | xargs pip uninstall -y",
        )
