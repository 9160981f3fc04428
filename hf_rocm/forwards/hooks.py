"""Record and replay prompts, the forward of a prepared model that doesn't generate, and its methods for features.

The replacements are set on the class, not on the model, like the methods of recorded steps. Models that are not
prepared, and subclasses, run the original forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from hf_rocm import patches
from hf_rocm.forwards import decide, prompts
from hf_rocm.forwards.padding import ENCODERS
from hf_rocm.forwards.runner import NOT_RUN, Kind, run
from hf_rocm.forwards.state import SETTINGS, refusal, release, state_of
from hf_rocm.generation.methods import put_before, take_away
from hf_rocm.ops.custom_op import compiling
from hf_rocm.options import Switch
from hf_rocm.overlay.replacements import origin


def switch_on(model: nn.Module, wanted: Switch) -> dict[str, str | None]:
    """Record the prompts of this prepared model if it generates, and the forwards of models in it that don't.

    Returns a dict from the name of every such model (`""` for the model itself) to the reason why its prompts or
    forwards are not recorded, or to None if they are.
    Raises `GraphError` if graphs are required for the model itself and it can't be recorded.
    """
    switch_off(model)
    reasons: dict[str, str | None] = {}
    for name, encoder in decide.encoders(model):
        required = wanted is Switch.REQUIRED and encoder is model
        reasons[name] = reason = decide.refuses_model(encoder, wanted)
        if reason is None:
            methods = {name: method for name, method in _METHODS.items() if _is_transformers(type(encoder), name)}
            put_before(encoder, methods, SETTINGS)
            encoder.__dict__[SETTINGS] = {"required": required}
        elif required:
            raise refusal(type(encoder).__name__, reason)
    found = prompts.generator_in(model)
    if found is not None:
        name, generator = found
        reasons[name] = reason = decide.refuses_model(generator, wanted)
        if reason is None:
            put_before(generator, {"forward": prompts.forward}, SETTINGS)
            generator.__dict__[SETTINGS] = {"required": False}
    return reasons


def switch_off(model: nn.Module) -> None:
    """Free the recordings of a model and of the models inside it, and restore their original forwards."""
    for module in model.modules():
        if module.__dict__.pop(SETTINGS, None) is not None:
            release(module)
            take_away(module, SETTINGS)


def _is_transformers(cls: type, name: str) -> bool:
    """Return whether a method is the forward, which is checked elsewhere, or is defined by transformers."""
    values = (patches.original(parent, name) for parent in cls.__mro__)
    value = next((value for value in values if value is not patches.ABSENT), None)
    return name == "forward" or origin(value).partition(".")[0] == "transformers"


def _run(name: str, self: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # nn.DataParallel creates new replicas on every call.
    if compiling() or "_is_replica" in self.__dict__:
        return stock(*args, **kwargs)
    state = state_of(self)
    if state.disabled is not None:
        state.turned_away[state.disabled] += 1
        return stock(*args, **kwargs)
    output = run(self, state, stock, args, kwargs, Kind(name, ENCODERS if name == "forward" else None))
    return stock(*args, **kwargs) if output is NOT_RUN else output


_METHODS = {name: partial(_run, name) for name in ("forward", "get_image_features", "get_text_features")}
