"""Loading a model to look at it: on the GPU if there is one, with one clear error if there isn't what was asked for."""

from __future__ import annotations

from typing import Any

from hf_rocm.errors import OptionError


def load(model: str, *, device: str | None = None, force: bool = False) -> Any:
    """`hf_rocm.from_pretrained(model)` on `device`, by default the first GPU, else the CPU."""
    import torch

    from hf_rocm.loader import from_pretrained

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch says so in either way
        raise OptionError(
            f"there is no device {name!r} here",
            facts={"torch says": str(error).splitlines()[0]},
            hint="leave --device out, or name one such as cpu, cuda or cuda:1",
        ) from error
    return from_pretrained(model, force=force or None).to(target).eval()
