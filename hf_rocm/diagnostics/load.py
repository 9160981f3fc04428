"""Loading a model to look at it: on the GPU if there is one, with one clear error if there isn't what was asked for."""

from __future__ import annotations

from typing import Any

from hf_rocm.errors import OptionError


def load(model: str, *, device: str | None = None, force: bool = False, stock: bool = False) -> Any:
    """`hf_rocm.from_pretrained(model)` on `device`, by default the first GPU, else the CPU. stock: not prepared."""
    from hf_rocm.loader import from_pretrained

    target = device_named(device)
    return from_pretrained(model, force=False if stock else force or None).to(target).eval()


def device_named(device: str | None) -> Any:
    """The torch device of this name, by default the first GPU, else the CPU. Raises `OptionError` if it isn't there."""
    import torch

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch says so in either way
        raise OptionError(
            f"there is no device {name!r} here",
            facts={"torch says": str(error).splitlines()[0]},
            hint="leave --device out, or name one such as cpu, cuda or cuda:1",
        ) from error
