"""Bind stock classes to declared layers, under the class names of the installed release."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from hf_rocm.overlay.bind import Forward, bind_to


class Layer(Protocol):
    """A declared layer (see `hf_rocm.layers`): a frozen object whose `forward` takes (module, stock, x, …)."""

    @property
    def forward(self) -> Forward: ...


def binds(cls: type, layer: Layer) -> None:
    """Bind a stock class to a declared layer.

    The layer is stored as the binding's `layer`, so that other layers can read the declaration instead of calling the
    module.
    """
    _bind(cls, layer, sys._getframe(1).f_globals)


def binds_first(module: str, **layers: Layer) -> None:
    """Bind a class whose name differs between releases: the first of these names that exists in the stock module.

    Pass the module as a literal, because the names of an overlay's dependencies are derived from it. Raises
    `ImportError` if the module has none of the names.
    """
    space = vars(sys.modules[module])
    name = next((name for name in layers if name in space), None)
    if name is None:
        raise ImportError(f"{module} has none of {', '.join(layers)}")
    _bind(space[name], layers[name], sys._getframe(1).f_globals)


def _bind(cls: type, layer: Layer, home: dict[str, Any]) -> None:
    """Bind one class. home: the namespace of the overlay, which identifies its bindings."""
    fuses, experts = getattr(layer, "fuses", ()), getattr(layer, "experts", ())
    bind_to(cls, layer.forward, home=home, fuses=fuses, experts=experts, layer=layer)
