"""The release of transformers, for differences between releases that do not need separate overlays."""

from __future__ import annotations

import sys
from importlib import metadata

import torch
from packaging.version import Version

from hf_rocm.overlay.replacements import constant_in_traces


def before(release: str) -> bool:
    """Return whether transformers is older than the release. Call it at import, since compilers can't trace it."""
    installed = getattr(sys.modules.get("transformers"), "__version__", None) or metadata.version("transformers")
    return Version(installed) < Version(release)


@constant_in_traces
def rounded_root(value: int, dtype: torch.dtype) -> float:
    """Return the square root of value, rounded to a dtype, as in models of transformers 4 that store it in a tensor."""
    return torch.tensor(value, dtype=torch.float32).sqrt().to(dtype).item()
