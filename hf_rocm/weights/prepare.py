"""Everything that is done to a model after loading, in order and in place, and the way back.

`prepare` binds the overlays of the model's classes, marks its modules to run them, and fuses their linear layers.
Running it twice equals running it once; `restore` takes all of it back.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from torch import nn

from hf_rocm import options
from hf_rocm.device import is_rocm
from hf_rocm.errors import OptionError, OverlayError
from hf_rocm.overlay import bind
from hf_rocm.weights.fuse import fuse, unfuse
from hf_rocm.weights.sharing import shared

ModelT = TypeVar("ModelT", bound=nn.Module)

# What was done, as plain builtins in the model's __dict__, for `explain`; see `_Report`.
REPORT = "_hf_rocm_report"

_OURS = "_hf_rocm_"  # every name that we leave in a module's __dict__ starts with it

_log = logging.getLogger("hf_rocm")


def prepare(model: ModelT, *, force: bool | None = None) -> ModelT:
    """Make a loaded model run its ROCm path. In place; returns the model.

    force: True switches the path on where there is no ROCm; False leaves the model as it is; None goes by the
    machine and `HF_ROCM_FORCE`. Where nothing is done, the `hf_rocm` logger says so in one line.
    What was fused or left alone, and why, is in `hf_rocm.explain(model)`.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            "prepare takes a model",
            facts={"expected": "a torch.nn.Module", "found": type(model).__qualname__},
            hint="a pipeline has its model in `.model`",
        )
    if force is False:
        _log.info("%s stays stock: force=False", type(model).__name__)
        return model
    forced = force is True or options.force_requested()
    if not forced and not is_rocm():
        _log.warning(
            "%s stays stock: this PyTorch is not a ROCm build (force=True or HF_ROCM_FORCE=1 prepares it anyway)",
            type(model).__name__,
        )
        return model
    overlays, refused = _bind_overlays(model)
    _switch_on(model, bind.ON if forced else bind.GPU)
    joined, skipped = _fuse(model)
    model.__dict__[REPORT] = {
        "forced": forced,
        "overlays": overlays,  # models whose overlays are bound
        "refused": refused,  # model: why its overlay can't be used
        "fused": joined,  # module: its layers
        "skipped": skipped,  # module: why its layers were left alone
    }
    return model


def restore(model: ModelT) -> ModelT:
    """Give back the stock model: its forwards, the memory of its weights, no trace of ours. In place."""
    for module in model.modules():
        unfuse(module)
        for name in [name for name in module.__dict__ if name.startswith(_OURS)]:
            del module.__dict__[name]
        if bind.mode_of(module) != bind.OFF:  # an installed overlay serves every instance that isn't marked
            bind.set_mode(module, bind.OFF)
    return model


def _bind_overlays(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Bind the overlays of the model's classes where they aren't; a class mode is not changed by it."""
    from hf_rocm.overlay import catalog
    from hf_rocm.overlay.activate import activate

    known = set(catalog.load().models())
    bound, refused = [], {}
    for name in sorted(families(model) & known):
        try:
            bound += activate(name, everywhere=False)
        except OverlayError as error:  # a refusal: this family stays stock, the others don't depend on it
            refused[name] = str(error)
    return bound, refused


def families(model: nn.Module) -> set[str]:
    """The folders under transformers.models that the classes of all submodules come from."""
    modules = {type(module).__module__ for module in model.modules()}
    parts = (module.split(".") for module in modules)
    return {part[2] for part in parts if part[:2] == ["transformers", "models"] and len(part) > 3}


def _switch_on(model: nn.Module, mode: str) -> None:
    for module in model.modules():
        if bind.binding_of(module) is not None:
            bind.set_mode(module, mode)


def _fuse(model: nn.Module) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Fuse what the overlays name, module by module: memory peaks at one module's weights."""
    joined: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    others = shared(model)
    for path, module in model.named_modules():
        binding = bind.binding_of(module)
        if binding is None or not binding.fuses:
            continue
        reason = _shares(module, binding.fuses, others) or fuse(module, binding.fuses)
        if reason is None:
            joined[path] = list(binding.fuses)
        else:
            skipped[path] = reason
    return joined, skipped


def _shares(module: nn.Module, names: tuple[str, ...], others: dict[int, str]) -> str | None:
    for name in names:
        linear: Any = module._modules.get(name)
        for parameter in () if linear is None else linear._parameters.values():
            if id(parameter) in others:
                return others[id(parameter)]
    return None
