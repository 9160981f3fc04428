"""Settings that ported code applies before it builds its model: allocator settings, and flags that some builds lack."""

from __future__ import annotations

import sys

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.overlay.facts import torch_facts

# in PyTorch's order of precedence
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# every release honours this variable; PyTorch 2.9 reads PYTORCH_ALLOC_CONF, but ignores expandable_segments in it
PORTABLE = "PYTORCH_CUDA_ALLOC_CONF"


def setup_environment(
    *, allocator: str | None = None, tf32: bool | None = None, cudnn_benchmark: bool | None = None
) -> list[str]:
    """Apply the settings that programs written for NVIDIA apply at startup, in a form that is also correct on AMD.

    Call it at the start of a program, instead of setting `PYTORCH_CUDA_ALLOC_CONF` and `torch.backends.…` manually. The
    same call works on every machine and applies what that machine supports.

    allocator: settings of PyTorch's allocator, such as `expandable_segments:True`; None keeps the current settings.
    Settings in the user's environment take precedence. On ROCm, `max_split_size_mb` is removed if expandable segments
    are enabled, even from the current settings: the combination lets memory grow without bound, and has corrupted data
    on some GPUs.
    tf32: allow TF32 in matrix multiplications and convolutions. cudnn_benchmark: let cuDNN or MIOpen benchmark
    algorithms. Flags that this build lacks are skipped.

    Returns lines for a log: at most one for the allocator, and one for every flag that was set or skipped. Imports
    torch only if a flag is given.
    Raises `OptionError` if allocator is neither a string nor None, or if the allocator is already in use with other
    settings.
    """
    if not isinstance(allocator, str | None):
        raise OptionError(
            f"allocator={allocator!r} is not valid",
            facts={"allowed": "a string such as expandable_segments:True, or None"},
        )
    done = _set_allocator(allocator)
    flags = {
        "backends.cuda.matmul.allow_tf32": tf32,
        "backends.cudnn.allow_tf32": tf32,
        "backends.cudnn.benchmark": cudnn_benchmark,
    }
    return done + [_set_flag(name, value) for name, value in flags.items() if value is not None]


def expands(settings: str) -> bool:
    """Return whether allocator settings enable expandable segments."""
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def without(settings: str, option: str) -> str:
    """Return allocator settings without one option."""
    return ",".join(part for part in settings.split(",") if part.split(":")[0].strip() != option)


def conflicting(settings: str) -> bool:
    """Return whether allocator settings combine the two options that are incompatible on ROCm."""
    return expands(settings) and without(settings, "max_split_size_mb") != settings


def _set_allocator(wanted: str | None) -> list[str]:
    environment = options.environment()
    variable = next((name for name in ALLOCATOR if environment.get(name, "").strip()), None)
    before = environment[variable] if variable else ""
    settings = before or wanted or ""
    if conflicting(settings) and torch_facts().hip:
        settings = without(settings, "max_split_size_mb")
    if settings == before:
        overridden = bool(variable and wanted and wanted != before)
        return [f"{variable}={before} in the environment overrides {wanted}"] if overridden else []
    if _gpu_in_use():
        raise OptionError(
            "the allocator is already in use, so its settings can't be changed",
            facts={"requested": settings, "in effect": before or "PyTorch's defaults"},
            hint="call hf_rocm.setup_environment() before anything uses the GPU",
        )
    name = variable or PORTABLE
    options.set_variable(name, settings)
    if before:
        return [f"{name}={settings}: removed max_split_size_mb, which is incompatible with expandable_segments on ROCm"]
    return [f"{name}={settings}"]


def _gpu_in_use() -> bool:
    """Return whether this process has opened a GPU. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _set_flag(name: str, value: bool) -> str:
    import torch

    *path, attribute = name.split(".")
    owner: object = torch
    for part in path:
        owner = getattr(owner, part)
    try:
        getattr(owner, attribute)
        setattr(owner, attribute, value)
    except (AttributeError, RuntimeError) as error:
        return f"skipped torch.{name}: {error}"
    return f"torch.{name}={value}"
