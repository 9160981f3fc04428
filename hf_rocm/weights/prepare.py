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
from hf_rocm.ops import probe
from hf_rocm.overlay import bind
from hf_rocm.overlay.adopt import adopt, disown
from hf_rocm.route import backend_of, route_linear, unroute
from hf_rocm.weights import experts, replaced
from hf_rocm.weights import preshuffle as shuffling
from hf_rocm.weights.budget import in_bytes
from hf_rocm.weights.fuse import fuse, unfuse
from hf_rocm.weights.joined import joined_already
from hf_rocm.weights.preshuffle import unshuffle
from hf_rocm.weights.quantize import bring_back
from hf_rocm.weights.sharing import first_shared, shared

ModelT = TypeVar("ModelT", bound=nn.Module)

# What was done, as plain builtins in the model's __dict__, for `explain`; see `_Report`.
REPORT = "_hf_rocm_report"

# Set on a model whose steps are recorded; state.py's SETTINGS.
GRAPHS = "_hf_rocm_graphs"

# Set on a model that `hf_rocm.compile` compiled; compile.py's own.
COMPILED = "_hf_rocm_compiled"

_OURS = "_hf_rocm_"  # every name that we leave in a module's __dict__ starts with it

_log = logging.getLogger("hf_rocm")


def prepare(
    model: ModelT,
    *,
    force: bool | None = None,
    preshuffle: str | None = None,
    budget: int | float | str | None = None,
    linear_backend: str | None = None,
    graphs: bool | None = None,
) -> ModelT:
    """Make a loaded model run its ROCm path. In place; returns the model.

    force: True switches the path on where there is no ROCm; False leaves the model as it is; None goes by the
    machine and `HF_ROCM_FORCE`. Where nothing is done, the `hf_rocm` logger says so in one line.
    preshuffle: which weights get the order of aiter's assembly kernels: `off`, `auto` (where a gain is known) or
    `all`; None goes by `HF_ROCM_PRESHUFFLE`. budget: how much memory shuffled copies may take, in bytes or as a share
    of the weights (see `weights.budget`); None goes by `HF_ROCM_PRESHUFFLE_BUDGET`, which is 0. With
    `PRESHUFFLE_M_THRESH=0` a shuffled weight replaces the original and needs none. A model that was prepared before and
    gets neither argument is shuffled as it was. linear_backend: route every other
    linear layer too, see `hf_rocm.route_linear`; None leaves them to PyTorch.
    graphs: whether `generate` decodes over recorded steps: False never, True always (what can't be recorded raises),
    None goes by `HF_ROCM_GRAPHS`, or as the model was prepared before.
    What was fused, shuffled, recorded or left alone, and why, is in `hf_rocm.explain(model)`. Raises `OptionError`,
    and `GraphError` where graphs are required of a model that can't have them.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            "prepare takes a model",
            facts={"expected": "a torch.nn.Module", "found": type(model).__qualname__},
            hint="a pipeline has its model in `.model`",
        )
    check_arguments(preshuffle=preshuffle, budget=budget, linear_backend=linear_backend)
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
    before = model.__dict__.get(REPORT, {})
    asked = shuffling.settings(model, preshuffle, budget, before.get("preshuffle"))
    probe.ahead(next((each.device for each in model.parameters()), None))
    overlays, refused = _bind_overlays(model)
    _switch_on(model, bind.ON if forced else bind.GPU)
    _compile_safely(model, bind.ON if forced else bind.GPU)
    joined, skipped = _fuse(model)
    shuffled = shuffling.preshuffle(model, asked)
    routed = None if linear_backend is None else route_linear(model, linear_backend=linear_backend, force=force)
    model.__dict__[REPORT] = {
        "forced": forced,
        "overlays": overlays,  # models whose overlays are bound
        "refused": refused,  # model: why its overlay can't be used
        "fused": joined,  # module: its layers
        "skipped": skipped,  # module: why its layers were left alone
        "joined": {path: names for path, module in model.named_modules() if (names := joined_already(module))},
        "preshuffle": shuffled,  # what was asked for, what was shuffled or skipped and why, bytes of copies
        "graphs": _record_steps(
            model,
            before.get("graphs", {}).get("asked") if graphs is None else graphs,
            bind.ON if forced else bind.GPU,
        ),
        "inputs": _keep_inputs(model, bind.ON if forced else bind.GPU),  # why transformers prepares its steps, or None
        "routed": None if routed is None else {"backend": routed.backend, "layers": routed.layers},
    }
    return model


def check_arguments(*, preshuffle: Any, budget: Any, linear_backend: Any) -> None:
    """Raise `OptionError` on a value that no model can be prepared with, before any is loaded."""
    if preshuffle is not None:
        options.preshuffle_mode(preshuffle)
    if budget is not None:
        in_bytes(budget, 0)
    if linear_backend is not None:
        backend_of(linear_backend)


def restore(model: ModelT) -> ModelT:
    """Give back the stock model: its forwards, the memory of its weights, no trace of ours. In place.

    Raises `OptionError`, and leaves the model as it is, if it was quantised without keeping the originals.
    """
    bring_back(model)
    if GRAPHS in model.__dict__:
        from hf_rocm.generation.hooks import switch_off

        switch_off(model)
    if hasattr(model, "generate"):
        from hf_rocm.generation import plain_masks

        plain_masks.switch_off(model)
    if COMPILED in model.__dict__:
        from hf_rocm.generation.compile import undo

        undo(model)
    unshuffle(model)
    unroute(model)
    for module in model.modules():
        experts.unstack(module)
        unfuse(module)
        disown(module)
        for name in [name for name in module.__dict__ if name.startswith(_OURS)]:
            del module.__dict__[name]
        if bind.mode_of(module) != bind.OFF:  # an installed overlay serves every instance that isn't marked
            bind.set_mode(module, bind.OFF)
    return model


def _bind_overlays(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Bind the overlays of the model's classes where they aren't; a class mode is not changed by it."""
    from hf_rocm.overlay import catalog
    from hf_rocm.overlay.activate import activate, is_active

    found = families(model)
    bound = sorted(filter(is_active, found))  # the catalog takes longer to read than a checkpoint to map
    refused: dict[str, str] = {}
    if len(bound) == len(found):
        return bound, refused
    overlays = catalog.load()
    for name in sorted(found.intersection(overlays.models()).difference(bound)):
        try:
            bound += activate(name, everywhere=False, catalog=overlays)
        except OverlayError as error:  # a refusal: this family stays stock, the others don't depend on it
            refused[name] = str(error)
    return sorted(bound), refused


def families(model: nn.Module) -> set[str]:
    """The folders under transformers.models that the classes of all submodules come from."""
    modules = {type(module).__module__ for module in model.modules()}
    parts = (module.split(".") for module in modules)
    return {part[2] for part in parts if part[:2] == ["transformers", "models"] and len(part) > 3}


def _switch_on(model: nn.Module, mode: str) -> None:
    for module in model.modules():
        if bind.binding_of(module) is not None:
            bind.set_mode(module, mode)
            adopt(module)


def _fuse(model: nn.Module) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Fuse what the overlays name, module by module: memory peaks at one module's weights."""
    joined: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    others = shared(model)
    inside: set[int] = set()  # experts that were stacked: nothing in them is fused one by one
    for path, module in model.named_modules():
        binding = bind.binding_of(module)
        if binding is not None and binding.experts:
            reason = _experts_share(module, others) or experts.stack(module, binding.experts)
            if reason is None:
                joined[path] = [experts.LIST]
                inside.update(id(each) for each in experts.members(module))
            else:
                skipped[path] = reason
        if binding is None:
            unfuse(module)  # its class was exchanged since, as FSDP2 does: nothing would call the block any more
        if binding is None or not binding.fuses or id(module) in inside:
            continue
        if replaced.is_group(module, binding.fuses):
            reason = None
        else:
            reason = _shares(module, binding.fuses, others) or fuse(module, binding.fuses)
        if reason is None:
            joined[path] = list(binding.fuses)
        else:
            skipped[path] = reason
    return joined, skipped


def _compile_safely(model: nn.Module, mode: str) -> None:
    """Have what transformers compiles by itself be compiled with settings that are safe on ROCm."""
    if hasattr(model, "generate"):
        from hf_rocm.generation.compile import switch_on

        switch_on(model, mode)


def _record_steps(model: nn.Module, graphs: bool | None, mode: str) -> dict[str, Any]:
    """Have `generate` decode over recorded steps. Returns what was asked for, and why it is off or None."""
    if not hasattr(model, "generate"):
        return {"asked": graphs, "off": "it does not generate"}
    from hf_rocm.generation.hooks import switch_on

    return {"asked": graphs, "off": switch_on(model, graphs, mode)}


def _keep_inputs(model: nn.Module, mode: str) -> str | None:
    """Have `generate` advance the inputs of its steps in place. Returns why it doesn't, or None."""
    if not hasattr(model, "generate"):
        return "it does not generate"
    from hf_rocm.generation import inputs, plain_masks

    plain_masks.switch_on(model)
    return inputs.switch_on(model, mode)


def _shares(module: nn.Module, names: tuple[str, ...], others: dict[int, str]) -> str | None:
    linears = (module._modules.get(name) for name in names)
    parameters = (each for linear in linears if linear is not None for each in linear._parameters.values())
    return first_shared(parameters, others)


def _experts_share(module: nn.Module, others: dict[int, str]) -> str | None:
    parameters = (parameter for each in experts.members(module) for parameter in each.parameters(recurse=False))
    return first_shared(parameters, others)
