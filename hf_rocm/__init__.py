"""hf_rocm: stock Hugging Face transformers, fast and right on AMD GPUs, and taken off without a trace.

The public names are looked up when they are used, so importing hf_rocm imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "HfRocmError": "hf_rocm.errors",
    "activate": "hf_rocm.overlay.activate",
    "check": "hf_rocm.overlay.check",
    "deactivate": "hf_rocm.overlay.activate",
    "explain": "hf_rocm.diagnostics.explain",
    "from_pretrained": "hf_rocm.loader",
    "prepare": "hf_rocm.weights.prepare",
    "restore": "hf_rocm.weights.prepare",
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from hf_rocm.diagnostics.explain import explain as explain
    from hf_rocm.errors import HfRocmError as HfRocmError
    from hf_rocm.loader import from_pretrained as from_pretrained
    from hf_rocm.overlay.activate import activate as activate
    from hf_rocm.overlay.activate import deactivate as deactivate
    from hf_rocm.overlay.check import check as check
    from hf_rocm.weights.prepare import prepare as prepare
    from hf_rocm.weights.prepare import restore as restore


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'hf_rocm' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
