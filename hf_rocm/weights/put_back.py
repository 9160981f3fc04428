"""Put ordinary modules into the places of those that `quantize` or a quantised checkpoint put there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

# The attributes of a module with the hooks of its forward, and with their options.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

_log = logging.getLogger("hf_rocm")


def put_back_all(model: nn.Module, kind: type[Any], ordinary: Callable[[Any], nn.Module]) -> None:
    """Replace all modules of this kind inside a model.

    ordinary: a function that returns the module for its place. It is called once for a module with several places.
    """
    known: dict[int, nn.Module] = {}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, kind):
                if id(child) not in known:
                    known[id(child)] = ordinary(child)
                put_back(parent, name, known[id(child)], f"{path}.{name}" if path else name)


def put_back(parent: nn.Module, name: str, module: nn.Module, path: str) -> None:
    """Replace a child with this module, which takes the child's mode and the hooks of its forward.

    path: the child's name in the model, for a message.
    """
    child: Any = parent._modules[name]
    module.train(child.training)
    for hooks in _HOOKS:
        # These are the same dicts, so that the handles remain valid.
        if child.__dict__.get(hooks):
            module.__dict__[hooks] = child.__dict__[hooks]
    if "forward" in child.__dict__:
        _log.warning("the forward that was set on %s is gone, because the layer is no longer quantised", path)
    parent._modules[name] = module
