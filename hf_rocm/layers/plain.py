"""Decide whether calling a module would only run the forward of its class, so that an operation may compute it instead.

Norms, dropouts and activations are often PyTorch's own modules, which no overlay binds. So they are examined in every
call that computes them as a part of an operation.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import Dropout  # the name in torch.nn may have been replaced

from hf_rocm.overlay.replacements import constant_in_traces, unchanged, watches

_hooks_on_all = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def is_plain(module: Any) -> bool:
    """Return whether a call of this module would only run the forward of its class, as the class's file defines it.

    False if the module has hooks, its own forward or a compiled one, if hooks are registered on all modules, and if its
    class is not `is_stock`.
    """
    own = module.__dict__
    if "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    every, before, backward, before_backward = _hooks_on_all
    return not (every or before or backward or before_backward) and is_stock(module.__class__)


def dropout_reason(dropout: Any) -> str | None:
    """Return why a dropout module must be called, or None if its call would return its input unchanged."""
    if dropout.__class__ is not Dropout or not is_plain(dropout):
        return "its dropout was replaced or has hooks"
    return f"its dropout ({dropout.p}) is in training mode" if dropout.training and dropout.p else None


@constant_in_traces
def is_stock(kind: type) -> bool:
    """`replacements.unchanged` with one Python call fewer, because every layer of an uncaptured step calls it."""
    watch = watches.get(kind)
    return unchanged(kind) if watch is None else watch.unchanged() or watch.holds()
