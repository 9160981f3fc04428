"""Prepare a loaded model in place, and restore it.

`prepare` binds the overlays of the model's classes, marks its modules to run them, and fuses their linear layers.
Without `quantize`, it is idempotent, and `restore` undoes everything.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from torch import nn

from hf_rocm import options, patches
from hf_rocm.arguments import require_module, require_switches
from hf_rocm.budget import in_bytes
from hf_rocm.device import is_rocm
from hf_rocm.errors import OverlayError
from hf_rocm.ops import probe
from hf_rocm.overlay import bind
from hf_rocm.overlay.instance_forwards import adopt, disown
from hf_rocm.weights import encode_stored, kinds, patch_embeddings
from hf_rocm.weights import preshuffle as shuffling
from hf_rocm.weights import quantize as quantizing
from hf_rocm.weights.linear_routing import backend_of, route_head, route_linear, unroute
from hf_rocm.weights.tied_weights import shared

ModelT = TypeVar("ModelT", bound=nn.Module)

# The key of the report in the model's __dict__. The report consists of builtins, and `explain` reads it.
REPORT = "_hf_rocm_report"

# The prefix of the names that hf_rocm adds to a module's __dict__, except `forward`.
_OURS = "_hf_rocm_"

_log = logging.getLogger("hf_rocm")


def prepare(
    model: ModelT,
    *,
    force: bool | None = None,
    preshuffle: str | None = None,
    budget: int | float | str | None = None,
    linear_backend: str | None = None,
    quantize: str | None = None,
    graphs: bool | None = None,
) -> ModelT:
    """Enable the ROCm path of a loaded model in place: overlays, fused and shuffled weights, recorded decode steps.

    model: a `torch.nn.Module` that is or contains a transformers model.
    force: True enables the path without ROCm too; False leaves the model stock; None enables it on ROCm, or if
    `HF_ROCM_FORCE` is set. If the model stays stock, the `hf_rocm` logger reports it in one line.
    preshuffle: which weights are shuffled for aiter's assembly kernels: `off`, `auto` (where a gain is known) or `all`;
    None uses `HF_ROCM_PRESHUFFLE`.
    budget: memory limit for shuffled copies, in bytes or as a share of the weights (`4 * 2**30`, `"4GiB"`, `0.25`,
    `"25%"`); None uses `HF_ROCM_PRESHUFFLE_BUDGET`, by default 0. With `PRESHUFFLE_M_THRESH=0` a shuffled weight
    replaces the original and needs no budget. Without preshuffle and budget, a model that was prepared before keeps its
    settings.
    linear_backend: also route the plain linear layers, including fused ones (see `hf_rocm.route_linear`); None routes
    none.
    quantize: `fp8`, `int8`, `int4`, `int4-g64`, `int4-g32` or `mxfp4` (see `hf_rocm.quantize`); None leaves the weights
    as they are.
    graphs: whether to record the prompts and decode steps of `generate`, and the forwards of other models: False never,
    True always (raises an error if a step or such a forward can't be recorded); None uses the model's earlier setting,
    else `HF_ROCM_GRAPHS`.

    Returns the same model. `hf_rocm.explain(model)` lists what was fused, shuffled, recorded or left stock, and why.
    Raises `OptionError` on an invalid argument, `GraphError` if graphs are required for a model that does not support
    them, and `TierUnavailable` if `linear_backend="aiter"` can't serve a layer.
    """
    require_module(model, "prepare")
    options.refresh()
    check_arguments(preshuffle=preshuffle, budget=budget, linear_backend=linear_backend, force=force, graphs=graphs)
    if quantize is not None:
        quantizing.check_options(quantize, force=force)
    if force is False:
        _log.info("%s is left as it is: force=False", type(model).__name__)
        return model
    forced = force is True or options.force_requested()
    if not forced and not is_rocm():
        _log.warning(
            "%s stays stock: this PyTorch is not a ROCm build (force=True or HF_ROCM_FORCE=1 prepares it anyway)",
            type(model).__name__,
        )
        return model
    before = report_of(model)
    settings = shuffling.settings(model, preshuffle, budget, before.get("preshuffle"))
    probe.ahead(next((parameter.device for parameter in model.parameters()), None))
    overlays, refused = _bind_overlays(model)
    _switch_on(model, bind.ON if forced else bind.GPU)
    _compile_safely(model, bind.ON if forced else bind.GPU)
    encode_stored.encode(model)
    joined, skipped = _fuse(model)
    shuffled = shuffling.preshuffle(model, settings)
    as_gemms, left_stock = patch_embeddings.attach(model, bind.ON if forced else bind.GPU)
    head = _route_head(model)
    routed = None if linear_backend is None else route_linear(model, linear_backend=linear_backend, force=force)
    _serve_flash(model, bind.ON if forced else bind.GPU)
    model.__dict__[REPORT] = {
        "forced": forced,
        # The models whose overlays are bound.
        "overlays": overlays,
        # model: why its overlay can't be used
        "refused": refused,
        # module: its layers
        "fused": joined,
        # module: why its layers are unchanged
        "skipped": skipped,
        # The settings, the shuffled weights, the skipped weights with reasons, and the bytes of copies.
        "preshuffle": shuffled,
        "graphs": _record_steps(
            model,
            before.get("graphs", {}).get("requested") if graphs is None else graphs,
            bind.ON if forced else bind.GPU,
        ),
        # Why transformers still prepares the inputs.
        "inputs": _keep_inputs(model, bind.ON if forced else bind.GPU),
        "forwards": _record_forwards(model, before.get("graphs", {}).get("requested") if graphs is None else graphs),
        # gemms: the convolutions that are computed as GEMMs; stock: other eligible ones, with the reasons
        "patch_embeddings": {"gemms": as_gemms, "stock": left_stock},
        # Why the output head stays stock.
        "head": head,
        "routed": None if routed is None else {"backend": routed.backend, "layers": routed.layers},
    }
    if quantize is not None:
        quantizing.quantize(model, quantize, force=force)
    return model


def report_of(model: nn.Module) -> dict[str, Any]:
    """Return the report of `prepare` on this model, or on the wrapped model that it generates with; empty if none."""
    if REPORT not in model.__dict__ and hasattr(model, "generate"):
        from hf_rocm.generation.decide import generator_of

        model = generator_of(model)
    report: dict[str, Any] = model.__dict__.get(REPORT) or {}
    return report


def check_arguments(*, preshuffle: Any, budget: Any, linear_backend: Any, **switches: Any) -> None:
    """Raise `OptionError` on an argument that is invalid for every model, before a model is loaded.

    switches: the arguments that are True, False or None.
    """
    require_switches(**switches)
    if preshuffle is not None:
        options.preshuffle_mode(preshuffle)
    if budget is not None:
        in_bytes(budget, 0)
    if linear_backend is not None:
        backend_of(linear_backend)


def restore(model: ModelT) -> ModelT:
    """Undo `prepare` in place: restore the stock forwards and the original storage of the weights.

    model: a model that was prepared; a stock model is not changed. Returns the same model.
    Raises `OptionError`, without changing the model, if it was quantised without keeping the original weights.
    """
    require_module(model, "restore")
    kinds.restore(model)
    from hf_rocm.generation import compile as compiling

    generator: Any = model
    if hasattr(model, "generate"):
        from hf_rocm.generation import decide, hooks, plain_masks
        from hf_rocm.generation.state import SETTINGS

        generator = decide.generator_of(model)
        if SETTINGS in generator.__dict__:
            hooks.switch_off(generator)
        plain_masks.switch_off(generator)
    for compiled in {model, generator}:
        if compiling.COMPILED in compiled.__dict__:
            compiling.undo(compiled)
    if hasattr(generator, "set_attn_implementation"):
        from hf_rocm.generation import flash_provider

        flash_provider.switch_off(generator)
    from hf_rocm.forwards import hooks as forwards

    forwards.switch_off(model)
    unroute(model)
    patch_embeddings.detach(model)
    for module in model.modules():
        disown(module)
        for name in [name for name in module.__dict__ if name.startswith(_OURS)]:
            del module.__dict__[name]
        # An installed overlay serves every instance that isn't marked.
        if bind.mode_of(module) != bind.OFF:
            bind.set_mode(module, bind.OFF)
    patches.release(model)
    patches.release(generator)
    return model


def _bind_overlays(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Bind the overlays of the model's classes that are not bound yet. The mode of a class is not changed."""
    from hf_rocm.overlay import catalog
    from hf_rocm.overlay.activate import activate, is_active

    bind.bind_waiting()
    names = families(model)
    # Look for bound overlays first: reading the catalog takes longer than mapping a checkpoint.
    bound = sorted(filter(is_active, names))
    refused: dict[str, str] = {}
    if len(bound) == len(names):
        return bound, refused
    overlays = catalog.load()
    for name in sorted(names.intersection(overlays.models()).difference(bound)):
        try:
            bound += activate(name, everywhere=False, catalog=overlays)
        except OverlayError as error:
            # This family stays stock; other families are not affected.
            refused[name] = str(error)
    return sorted(bound), refused


def families(model: nn.Module) -> set[str]:
    """Return the folders under transformers.models that define classes of the model's modules."""
    modules = {type(module).__module__ for module in model.modules()}
    parts = (module.split(".") for module in modules)
    return {part[2] for part in parts if part[:2] == ["transformers", "models"] and len(part) > 3}


def _switch_on(model: nn.Module, mode: str) -> None:
    for module in model.modules():
        if bind.binding_of(module) is not None:
            bind.set_mode(module, mode)
            adopt(module)


def _fuse(model: nn.Module) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Fuse the layers that the overlays name, one module at a time, so that peak memory grows by only one module."""
    joined: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    others = shared(model)
    # Modules whose weights are in another module's group, such as stacked experts.
    inside: set[int] = set()
    for path, module in model.named_modules():
        binding = bind.binding_of(module)
        if binding is None:
            kinds.release_unbound(module)
        elif id(module) not in inside:
            formed = kinds.form(module, binding, others)
            if formed is None:
                continue
            label, reason = formed
            if reason is None:
                joined[path] = label
                inside.update(id(member) for member in kinds.covered(module))
            else:
                skipped[path] = reason
    return joined, skipped


def _compile_safely(model: nn.Module, mode: str) -> None:
    """Make transformers compile this model with settings that are safe on ROCm."""
    if hasattr(model, "generate"):
        from hf_rocm.generation.compile import switch_on
        from hf_rocm.generation.decide import generator_of

        switch_on(generator_of(model), mode)


def _serve_flash(model: nn.Module, mode: str) -> None:
    """Make `flash_attention_2` available without the flash-attn package."""
    if hasattr(model, "set_attn_implementation"):
        from hf_rocm.generation import decide, flash_provider

        flash_provider.switch_on(decide.generator_of(model) if hasattr(model, "generate") else model, mode)


def _route_head(model: nn.Module) -> str | None:
    """Make the output head of a generating model use the kernel for few rows.

    Returns the reason if the head stays stock, else None. See `route_head`.
    """
    if not hasattr(model, "generate"):
        return "it does not generate"
    from hf_rocm.generation.decide import generator_of

    return route_head(generator_of(model))


def _record_steps(model: nn.Module, graphs: bool | None, mode: str) -> dict[str, Any]:
    """Make `generate` use recorded decode steps. Returns the setting, and the reason if recording is off, else None."""
    if not hasattr(model, "generate"):
        return {"requested": graphs, "off": "it does not generate"}
    from hf_rocm.generation import continuous_batching, decide, hooks

    model = decide.generator_of(model)
    off = hooks.switch_on(model, graphs, mode)
    continuous_batching.switch_on(model, required=hooks.wanted_of(graphs) is options.Switch.REQUIRED)
    return {"requested": graphs, "off": off}


def _record_forwards(model: nn.Module, graphs: bool | None) -> dict[str, str | None]:
    """Record the forwards of the models that don't generate.

    Returns, by name, the reason why the forward of a model is not recorded, or None if it is.
    """
    from hf_rocm.forwards import hooks
    from hf_rocm.generation.hooks import wanted_of

    return hooks.switch_on(model, wanted_of(graphs))


def _keep_inputs(model: nn.Module, mode: str) -> str | None:
    """Make `generate` update the inputs of its steps in place. Returns the reason if it does not, else None."""
    if not hasattr(model, "generate"):
        return "it does not generate"
    from hf_rocm.generation import decide, inputs, plain_masks

    model = decide.generator_of(model)
    plain_masks.switch_on(model)
    return inputs.switch_on(model, mode)
