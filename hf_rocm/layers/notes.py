"""Why a module took the stock forward at its last call: a plain string beside it, for `explain`."""

from __future__ import annotations

import torch
from torch import nn

STAYED = "_hf_rocm_stayed"


def note(module: nn.Module, reason: str | None) -> None:
    """Keep the reason, or forget an older one. Costs a dictionary lookup when there is nothing to say."""
    if torch.compiler.is_compiling():
        return
    if reason is not None:
        module.__dict__[STAYED] = reason
    elif STAYED in module.__dict__:
        del module.__dict__[STAYED]


def noted(module: nn.Module) -> str | None:
    """The reason of the last call, or None if it was served (or never called)."""
    reason: str | None = module.__dict__.get(STAYED)
    return reason
