"""Settings that a port makes before its model is built: the allocator's, and flags that not every build has."""

from __future__ import annotations

import sys

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.overlay.facts import torch_facts

# in the order in which PyTorch reads them
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# read by every release, with effect; 2.9 reads the first one and then ignores expandable_segments in it
PORTABLE = "PYTORCH_CUDA_ALLOC_CONF"


def setup_environment(
    *, allocator: str | None = None, tf32: bool | None = None, cudnn_benchmark: bool | None = None
) -> list[str]:
    """Make the settings that code written for NVIDIA makes at its top, so that they are right on AMD too.

    Call it first thing in a program, in place of `os.environ["PYTORCH_CUDA_ALLOC_CONF"] = …` and of
    `torch.backends.… = …`. On every machine the same call does what can be done there:

    allocator: settings for PyTorch's allocator, such as `expandable_segments:True`; None keeps the user's. On ROCm,
    `max_split_size_mb` is left out where expandable segments are on: together they let memory grow without end, and on
    some cards gave wrong data. A setting of the user's environment wins, less that.
    tf32: allow TF32 in products and convolutions; cudnn_benchmark: let cuDNN or MIOpen try algorithms. A flag that
    this build doesn't have is left out.

    Returns a sentence on each thing that was changed or left out, for a log. torch is imported only if a flag is
    given. Raises `OptionError` if the allocator is already at work with other settings.
    """
    done = _set_allocator(allocator)
    flags = {
        "backends.cuda.matmul.allow_tf32": tf32,
        "backends.cudnn.allow_tf32": tf32,
        "backends.cudnn.benchmark": cudnn_benchmark,
    }
    return done + [_set_flag(name, value) for name, value in flags.items() if value is not None]


def expands(settings: str) -> bool:
    """Whether allocator settings switch expandable segments on."""
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def without(settings: str, option: str) -> str:
    """Allocator settings less one of them."""
    return ",".join(part for part in settings.split(",") if part.split(":")[0].strip() != option)


def conflicting(settings: str) -> bool:
    """Whether they have the two options that don't go together on ROCm."""
    return expands(settings) and without(settings, "max_split_size_mb") != settings


def _set_allocator(wanted: str | None) -> list[str]:
    environment = options.environment()
    users = next((name for name in ALLOCATOR if environment.get(name, "").strip()), None)
    before = environment[users] if users else ""
    settings = before or wanted or ""
    if conflicting(settings) and torch_facts().hip:
        settings = without(settings, "max_split_size_mb")
    if settings == before:
        kept = bool(users and wanted and wanted != before)
        return [f"kept {users}={before}, which the environment has, instead of {wanted}"] if kept else []
    if _at_work():
        raise OptionError(
            "the allocator's settings can't be changed any more",
            facts={"wanted": settings, "in force": before or "PyTorch's defaults"},
            hint="call hf_rocm.setup_environment() before anything uses the GPU",
        )
    name = users or PORTABLE
    options.set_variable(name, settings)
    if before:
        return [f"{name}={settings}: max_split_size_mb was left out, which goes wrong with expandable_segments on ROCm"]
    return [f"{name}={settings}"]


def _at_work() -> bool:
    """Whether this process has opened a GPU; without importing torch."""
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
        return f"torch.{name} was left out: {error}"
    return f"torch.{name}={value}"
