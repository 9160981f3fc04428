"""Store why a module's last call ran the stock forward, as a plain string in its `__dict__`, for `explain`."""

from __future__ import annotations

import torch
from torch import nn

STAYED = "_hf_rocm_stayed"


def note(module: nn.Module, reason: str | None) -> None:
    """Store the reason, or remove an older one. If there is neither, this costs one dictionary lookup.

    Does nothing while torch.compile or torch.export traces.
    """
    if torch.compiler.is_compiling():
        return
    if reason is not None:
        module.__dict__[STAYED] = reason
    elif STAYED in module.__dict__:
        del module.__dict__[STAYED]


def noted(module: nn.Module) -> str | None:
    """Return the reason stored by the last call, or None if it was served or the module was never called."""
    reason: str | None = module.__dict__.get(STAYED)
    return reason
