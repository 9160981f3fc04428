"""Load a model for a tool, on a GPU if there is one, with a clear error if the requested device doesn't exist."""

from __future__ import annotations

from typing import Any

from hf_rocm import options
from hf_rocm.errors import LoadError, OptionError


def load(model: str, *, device: str | None = None, force: bool = False, stock: bool = False) -> Any:
    """Load a model with `hf_rocm.from_pretrained` on `device`, by default on the first GPU, else on the CPU.

    stock: don't prepare the model. Without ROCm or force the model stays stock without a warning, since the commands
    print the reason. Raises `LoadError` if transformers can't load the model.
    """
    from hf_rocm.device import is_rocm
    from hf_rocm.loading.pretrained import from_pretrained

    target = device_named(device)
    enabled = not stock and (force or options.force_requested() or is_rocm())
    try:
        loaded = from_pretrained(model, force=(force or None) if enabled else False)
    except ValueError as error:  # transformers doesn't recognise the config or has no class for it
        raise LoadError(
            f"no model could be loaded from {model!r}",
            facts={"transformers error": " ".join(str(error).split())[:300]},
            hint="a folder needs config.json, with model_type, and its weights (model.safetensors)",
        ) from error
    return loaded.to(target).eval()


def device_named(device: str | None) -> Any:
    """Return the torch device of this name, by default the first GPU, else the CPU. Raises `OptionError` if absent."""
    import torch

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch may raise either of them
        raise OptionError(
            f"there is no device {name!r} here",
            facts={"torch error": str(error).splitlines()[0]},
            hint="leave --device out, or name one such as cpu, cuda or cuda:1",
        ) from error
