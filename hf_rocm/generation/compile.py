"""torch.compile as it is known to behave on ROCm: for a model, and for what transformers compiles by itself.

The settings go into each compilation and nowhere else, so nothing of PyTorch's is changed for others and nothing has to
be put back. Whoever asks for something gets it: published reports disagree on `reduce-overhead`, so it is measured
(`hf-rocm bench --sides compile,reduce-overhead,hf_rocm`) and not ruled out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from hf_rocm import options
from hf_rocm.device import is_rocm
from hf_rocm.environment import ALLOCATOR, conflicting
from hf_rocm.errors import OptionError
from hf_rocm.generation.methods import put_before
from hf_rocm.overlay.bind import ON

ModelT = TypeVar("ModelT", bound=nn.Module)

# Inductor's own graphs and its memory planning have gone wrong on ROCm; its Triton products are slower than the
# library's there, and tuning them takes minutes.
SETTINGS: Mapping[str, Any] = {
    "triton.cudagraphs": False,
    "triton.cudagraph_trees": False,
    "memory_planning": False,
    "max_autotune_gemm_backends": "ATEN",
}

# In a model's __dict__: how far the automatic settings reach, as in `overlay.bind`; and that `compile` compiled it.
AUTOMATIC, COMPILED = "_hf_rocm_compile", "_hf_rocm_compiled"

_log = logging.getLogger("hf_rocm")


def compile(model: ModelT, *, force: bool | None = None, **overrides: Any) -> ModelT:
    """Compile a model's forward in place, with settings that are safe on ROCm; returns the model.

    overrides: what `torch.compile` takes. `options` are added to ours and win over them, and so does what a `mode`
    stands for. force: our settings where there is no ROCm too; there, a model is compiled with PyTorch's own.
    A compiled model's decode steps are no longer recorded. `hf_rocm.restore` takes the compilation off again.
    Raises `OptionError` where TF32 was set in two ways that PyTorch's compiler can't read together.
    """
    check()
    wanted = arguments(overrides) if force or (force is None and options.force_requested()) or is_rocm() else overrides
    from hf_rocm.generation import hooks

    hooks.switch_off(model)
    model.compile(**wanted)
    model.__dict__[COMPILED] = True
    return model


def undo(model: nn.Module) -> None:
    """Take off what `compile` did; somebody else's compilation stays."""
    if model.__dict__.pop(COMPILED, None):
        model._compiled_call_impl = None


def arguments(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `torch.compile`: our settings, then those of the mode that was asked for, then the options."""
    given = dict(overrides)
    if given.get("backend", "inductor") != "inductor":
        return given
    import torch._inductor as inductor

    mode, asked = given.pop("mode", None), given.pop("options", None)
    known = set(inductor.list_options())
    settings = {name: value for name, value in SETTINGS.items() if name in known}
    if mode not in (None, "default"):
        settings.update(inductor.list_mode_options(mode))
    return {**given, "options": {**settings, **(asked or {})}}


def check() -> None:
    """Warn of, or refuse, settings of this process that compiled code goes wrong with."""
    try:
        torch.backends.cuda.matmul.allow_tf32  # noqa: B018 (reading it is the test)
    except RuntimeError as error:
        raise OptionError(
            "TF32 was set in PyTorch's old way and in its new one, which its compiler can't read together",
            facts={"torch says": str(error).splitlines()[0]},
            hint="set it once, with hf_rocm.setup_environment(tf32=…) or torch.backends.fp32_precision",
        ) from error
    environment = options.environment()
    for name in ALLOCATOR:
        if is_rocm() and conflicting(environment.get(name, "")):
            _log.warning(
                "%s=%s: max_split_size_mb goes wrong with expandable_segments on ROCm; "
                "hf_rocm.setup_environment() leaves it out",
                name,
                environment[name],
            )


def switch_on(model: nn.Module, mode: str) -> None:
    """Have transformers' automatic compilation of a prepared model take these settings, where nobody asked for others.

    mode: `overlay.bind.ON` on any device, `GPU` for weights that are on one.
    """
    if hasattr(type(model), "get_compiled_call"):
        put_before(type(model), "get_compiled_call", _get_compiled_call, AUTOMATIC)
        model.__dict__[AUTOMATIC] = mode


def automatic(model: Any, asked: Any) -> Any:
    """The `CompileConfig` of a call: the user's, if there is one."""
    if asked is not None or (model.__dict__.get(AUTOMATIC) != ON and model.device.type != "cuda"):
        return asked
    from transformers import CompileConfig

    check()
    config: Any = CompileConfig(options=arguments({})["options"])
    config.mode = None  # which is mode `default`: PyTorch takes no options beside a mode
    return config


def _get_compiled_call(self: Any, stock: Callable[..., Any], compile_config: Any) -> Any:
    return stock(automatic(self, compile_config))
