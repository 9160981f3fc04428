"""Load a model for a tool, on a GPU if there is one, with a clear error if the requested device doesn't exist."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hf_rocm import options
from hf_rocm.errors import LoadError, OptionError


def load(model: str, *, device: str | None = None, force: bool = False, stock: bool = False) -> Any:
    """Load a model with `hf_rocm.from_pretrained` on `device`, by default the first GPU, or the CPU if there is no GPU.

    stock: don't prepare the model. Without ROCm or force, the model stays stock without a warning, since the commands
    print the reason. Raises `LoadError` if transformers can't load the model, and `OptionError` if there is
    no such device.
    """
    from hf_rocm.device import is_rocm
    from hf_rocm.loading.pretrained import from_pretrained

    target = device_named(device)
    enabled = not stock and (force or options.force_requested() or is_rocm())
    with loading(model):
        loaded = from_pretrained(model, force=(force or None) if enabled else False)
    return loaded.to(target).eval()


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Within the block, convert a ValueError, which transformers raises for an unknown model, to `LoadError`."""
    try:
        with _without_repeated_warnings():
            yield
    except ValueError as error:
        raise LoadError(
            f"no model could be loaded from {model!r}",
            facts={"transformers error": " ".join(str(error).split())[:300]},
            hint="the folder must contain config.json, with model_type, and the weights (model.safetensors)",
        ) from error


@contextmanager
def _without_repeated_warnings() -> Iterator[None]:
    """Within the block, drop repeated log messages of huggingface_hub up to the level WARNING.

    The first message from each line of huggingface_hub's code is kept. Without a network, huggingface_hub logs every
    failure and every retry, and finally raises the error.
    """
    # This import adds the handler.
    import_module("huggingface_hub.utils.logging")

    seen = set()

    def first(record: logging.LogRecord) -> bool:
        known = (record.pathname, record.lineno) in seen
        seen.add((record.pathname, record.lineno))
        return not known or record.levelno > logging.WARNING

    handlers = list(logging.getLogger("huggingface_hub").handlers)
    for handler in handlers:
        handler.addFilter(first)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(first)


def device_named(device: str | None) -> Any:
    """Return the torch device of this name; by default, the first GPU, else the CPU.

    Raises `OptionError` if there is no such device.
    """
    import torch

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        # torch may raise either of them.
        raise OptionError(
            f"there is no device {name!r} here",
            facts={"torch error": str(error).splitlines()[0]},
            hint="omit --device, or pass one such as cpu, cuda or cuda:1",
        ) from error
