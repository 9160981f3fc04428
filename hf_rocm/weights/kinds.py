"""All kinds of weight groups. The files of this package register them, and `import_all` imports all files."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from hf_rocm import weights
from hf_rocm.layers.weight_group import WeightGroup, kind_in, registered
from hf_rocm.weights.tied_weights import first_shared


def kinds() -> list[type[WeightGroup]]:
    """The kinds, in the order in which they are tried and restored."""
    import_all()
    return registered()


def kind_for(module: nn.Module, binding: Any) -> tuple[type[WeightGroup], tuple[str, ...]] | None:
    """Return the kind that groups layers of a module with this binding, with the layers' names, or None."""
    fits = ((kind, kind.names_for(module, binding)) for kind in kinds())
    return next(((kind, names) for kind, names in fits if names), None)


def form(module: nn.Module, binding: Any, others: dict[int, str]) -> tuple[list[str], str | None] | None:
    """Form the group of a module. Returns (its layers' names for a report, refusal or None), or None if no kind fits.

    others: the result of `tied_weights.shared`.
    """
    fit = kind_for(module, binding)
    if fit is None:
        return None
    kind, names = fit
    return kind.label(names), first_shared(kind.parameters(module, names), others) or kind.form(module, names)


def why_not(module: nn.Module, binding: Any) -> str | None:
    """Return the reason why the next call of a module would not use the group of its binding, or None."""
    fit = kind_for(module, binding)
    return None if fit is None else fit[0].why_not(module, fit[1])


def covered(module: nn.Module) -> list[nn.Module]:
    """The submodules whose weights are in the module's group."""
    kind = kind_in(module)
    return [] if kind is None else kind.covers(module)


def release_unbound(module: nn.Module) -> None:
    """Restore the group of a module whose class was replaced, as by FSDP2, if only an overlay's forward can call it."""
    kind = kind_in(module)
    if kind is not None and kind.only_in_overlays:
        kind.restore(module)


def restore(model: nn.Module) -> None:
    """Restore every group of a model. Raises `OptionError`, without changing anything, if one can't be restored."""
    for kind in kinds():
        kind.restore_model(model)


@cache
def import_all() -> None:
    """Import every file of `hf_rocm.weights`."""
    for file in pkgutil.iter_modules(weights.__path__, "hf_rocm.weights."):
        import_module(file.name)
