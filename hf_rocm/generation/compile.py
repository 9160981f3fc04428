"""torch.compile with settings that work on ROCm: for a model, and for calls that transformers compiles automatically.

The settings are arguments of every compilation. No global setting of PyTorch changes, so none has to be restored.
Settings that the user passes take precedence. Published reports disagree on `reduce-overhead`, so it is allowed, and
`hf-rocm bench --sides compile,reduce-overhead,hf_rocm` measures it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from hf_rocm import options, patches
from hf_rocm.arguments import require_module, require_switches
from hf_rocm.device import is_rocm
from hf_rocm.environment import ALLOCATOR, conflicting
from hf_rocm.errors import OptionError
from hf_rocm.generation.methods import put_before
from hf_rocm.overlay.bind import ON

ModelT = TypeVar("ModelT", bound=nn.Module)

# Inductor's own graphs and its memory planning have given wrong results on ROCm. Its Triton GEMMs are slower there than
# those of the BLAS library, and tuning them takes minutes.
SETTINGS: Mapping[str, Any] = {
    "triton.cudagraphs": False,
    "triton.cudagraph_trees": False,
    "memory_planning": False,
    "max_autotune_gemm_backends": "ATEN",
}

# In a model's __dict__: the devices that the automatic settings apply to, as in `overlay.bind`, and a flag that
# marks models that `compile` has compiled.
AUTOMATIC, COMPILED = "_hf_rocm_compile", "_hf_rocm_compiled"

_log = logging.getLogger("hf_rocm")


def compile(model: ModelT, *, force: bool | None = None, **overrides: Any) -> ModelT:
    """Compile a model's forward in place, with settings that are safe on ROCm. Returns the model.

    overrides: arguments of `torch.compile`. Its `options` and the options of its `mode` take precedence over the
    settings of hf_rocm. force: True uses these settings without ROCm too; None uses them under ROCm or with
    `HF_ROCM_FORCE`, and False only under ROCm. Otherwise, PyTorch's defaults are used. The decode steps of a compiled
    model are no longer recorded. `hf_rocm.restore` removes the compilation. Raises `OptionError` if model is not a
    `torch.nn.Module`, if force is not True, False or None, or if TF32 was set through both of PyTorch's interfaces.
    """
    require_module(model, "compile")
    require_switches(force=force)
    check()
    wanted = arguments(overrides) if force or (force is None and options.force_requested()) or is_rocm() else overrides
    from hf_rocm.generation import hooks

    hooks.switch_off(model)
    model.compile(**wanted)
    model.__dict__[COMPILED] = True
    return model


def undo(model: nn.Module) -> None:
    """Undo `compile`. A model that other code has compiled remains compiled."""
    if model.__dict__.pop(COMPILED, None):
        own = model.__dict__
        patches.exchange(own, "_compiled_call_impl", own.get("_compiled_call_impl", patches.ABSENT), patches.ABSENT)


def arguments(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `torch.compile`: the settings for ROCm, overridden by the `mode`, then by `options`.

    For backends other than inductor, the overrides are returned unchanged.
    """
    given = dict(overrides)
    if given.get("backend", "inductor") != "inductor":
        return given
    import torch._inductor as inductor

    mode, requested = given.pop("mode", None), given.pop("options", None)
    known = set(inductor.list_options())
    settings = {name: value for name, value in SETTINGS.items() if name in known}
    if mode not in (None, "default"):
        settings.update(inductor.list_mode_options(mode))
    return {**given, "options": {**settings, **(requested or {})}}


def check() -> None:
    """Check this process for conflicting settings: raise `OptionError` for TF32, and warn about the allocator."""
    try:
        torch.backends.cuda.matmul.allow_tf32  # noqa: B018 (reading it is the test)
    except RuntimeError as error:
        raise OptionError(
            "TF32 was set through both PyTorch's old interface and its new one, which makes torch.compile fail",
            facts={"torch error": str(error).splitlines()[0]},
            hint="set it once, with hf_rocm.setup_environment(tf32=…) or torch.backends.fp32_precision",
        ) from error
    environment = options.environment()
    for name in ALLOCATOR:
        if is_rocm() and conflicting(environment.get(name, "")):
            _log.warning(
                "%s=%s: max_split_size_mb and expandable_segments don't work together on ROCm; "
                "hf_rocm.setup_environment() removes max_split_size_mb",
                name,
                environment[name],
            )


def switch_on(model: nn.Module, mode: str) -> None:
    """Use these settings when transformers compiles a prepared model automatically, unless the user passes others.

    mode: `overlay.bind.ON` for any device, `GPU` for weights on a GPU.
    """
    if hasattr(type(model), "get_compiled_call"):
        put_before(model, {"get_compiled_call": _get_compiled_call}, AUTOMATIC)
        model.__dict__[AUTOMATIC] = mode


def automatic(model: Any, requested: Any) -> Any:
    """The `CompileConfig` of a call: the user's if there is one, else the settings for ROCm.

    Returns None if the user passes none and the automatic settings do not apply to the model's device.
    """
    if requested is not None or (model.__dict__.get(AUTOMATIC) != ON and model.device.type != "cuda"):
        return requested
    from transformers import CompileConfig

    check()
    config: Any = CompileConfig(options=arguments({})["options"])
    # None means `default`; PyTorch does not accept options together with a mode.
    config.mode = None
    return config


def _get_compiled_call(self: Any, stock: Callable[..., Any], compile_config: Any) -> Any:
    return stock(automatic(self, compile_config))
