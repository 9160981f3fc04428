"""The inputs of decode steps: prepared by transformers once per call to `generate`, then advanced in place.

transformers prepares every step from scratch: it reads signatures and configs, slices and copies tensors, and builds
the masks, mostly while the GPU waits. Here transformers prepares the first step of a call. If its masks and positions
are those of sequences with or without left padding, the following steps get the same arguments in resident tensors.
These are advanced after the previous step is launched, while the GPU is still computing it, or, in steps that verify
drafts, when the drafts are known. transformers prepares all other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hf_rocm import features
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.masks import UnsupportedStep
from hf_rocm.generation.methods import own, put_before, take_away
from hf_rocm.generation.resident_inputs import Step, verifies
from hf_rocm.generation.residents import Residents, Source
from hf_rocm.generation.watch import masks_replaced
from hf_rocm.overlay.bind import GPU, ON
from hf_rocm.overlay.dependencies import Reference
from hf_rocm.overlay.replacements import Watch

# In a model's __dict__: the devices on which hf_rocm prepares its steps, as in `overlay.bind`.
MARK = "_hf_rocm_inputs"
# In a model's __dict__: why transformers prepared the steps of the last call.
NOTE = "_hf_rocm_inputs_note"


def switch_on(model: nn.Module, mode: str = ON) -> str | None:
    """Prepare the decode steps of this model from now on. Returns why transformers must prepare them, or None.

    mode: `overlay.bind.ON` for any device, `GPU` for inputs on a GPU.
    """
    reason = refuses(model)
    if reason is None:
        methods: dict[str, Callable[..., Any]] = {
            "prepare_inputs_for_generation": _prepare,
            "_update_model_kwargs_for_generation": _update,
        }
        put_before(model, methods, MARK)
        model.__dict__[MARK] = mode
    return reason


def switch_off(model: nn.Module) -> None:
    """Let transformers prepare the steps of this model again."""
    take_away(model, MARK)
    model.__dict__.pop(MARK, None)
    model.__dict__.pop(NOTE, None)


def refuses(model: Any) -> str | None:
    """Return why transformers prepares the steps of models like this one, or None."""
    from transformers import GenerationMixin

    cls = type(model)
    if not issubclass(cls, GenerationMixin):
        return "it does not generate"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    for name in _METHODS:
        if own(cls, name, GenerationMixin):
            return f"{cls.__name__} has its own {name}"
    if hasattr(cls, "create_masks_for_generate"):
        return f"{cls.__name__} has its own create_masks_for_generate"
    return features.refuses("decode_inputs")


def noted(model: nn.Module) -> str | None:
    """Return why transformers prepared the steps of the last call, or None."""
    note: str | None = model.__dict__.get(NOTE)
    return note


def _prepare(
    model: Any, inherited: Callable[..., dict[str, Any]], input_ids: Tensor, *positional: Any, **arguments: Any
) -> dict[str, Any]:
    """Replaces `prepare_inputs_for_generation`. Returns the arguments of the next step."""
    cache = arguments.get("past_key_values")
    step = _step_of(cache)
    if step is not None and step.follows(arguments) and step.tokens(input_ids) <= _longest_step(cache):
        replaced = _replaced(model)
        if replaced is None:
            return step.inputs(cache, input_ids)
        model.__dict__[NOTE] = replaced
    if (
        step is not None
        and step.resumes(cache, arguments, input_ids)
        and step.tokens(input_ids) <= _longest_step(cache)
    ):
        replaced = _replaced(model)
        if replaced is None:
            step.resume(cache, arguments)
            return step.inputs(cache, input_ids)
        model.__dict__[NOTE] = replaced
    if step is not None and step.lacks(arguments):
        return inherited(input_ids, *positional, **step.restored(arguments, input_ids.shape[1]))
    inputs = inherited(input_ids, *positional, **arguments)
    if positional or (model.__dict__.get(MARK) == GPU and not input_ids.is_cuda):
        return inputs
    if not _is_step(inputs, cache):
        if cache in _refused:
            del _refused[cache]
        return inputs
    tokens = input_ids.shape[1]
    if cache in _refused and (verifies(cache) or _refused[cache] == tokens - 1):
        # This is the next step of a refused call.
        _refused[cache] = tokens
        return inputs
    try:
        replaced = features.replaced("decode_inputs") or masks_replaced(model)
        if replaced is not None:
            raise UnsupportedStep(replaced)
        step = Step(model.config, cache, arguments, inputs, {} if step is None else step.known)
    except UnsupportedStep as reason:
        model.__dict__[NOTE] = str(reason)
        _refused[cache] = tokens
        _steps.pop(cache, None)
        return inputs
    model.__dict__.pop(NOTE, None)
    _steps[cache] = step
    return step.inputs(cache, input_ids)


def _update(
    model: Any,
    inherited: Callable[..., dict[str, Any]],
    outputs: Any,
    model_kwargs: dict[str, Any],
    is_encoder_decoder: bool = False,
    num_new_tokens: int = 1,
) -> dict[str, Any]:
    """Replaces `_update_model_kwargs_for_generation`. Returns the arguments that the next step is prepared from."""
    cache = model_kwargs.get("past_key_values")
    step = _step_of(cache)
    if step is None or not step.matches(model_kwargs) or not (step.verifies or _methods().holds()):
        if isinstance(cache, DecodeCache) and cache.runner is not None:
            # The device may still be computing the prompt.
            cache.runner.prepare(model)
        return inherited(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
    if not step.verifies and (num_new_tokens != 1 or outputs.get("past_key_values", cache) is not cache):
        del _steps[cache]
        return inherited(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
    step.advance(cache, model_kwargs)
    return model_kwargs


def _replaced(model: Any) -> str | None:
    """Return a sentence about a method of transformers or a mask function that was replaced during a call, or None."""
    watch = _methods()
    return masks_replaced(model) if watch.holds() else watch.difference()


@cache
def _methods() -> Watch:
    """Return a watch on the methods of transformers that are called only for the first step."""
    from transformers import GenerationMixin

    return Watch(Reference(GenerationMixin, name) for name in _METHODS)


_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def begin(cache: DecodeCache, position: int | None, tokens: int, source: Source) -> Tensor | None:
    """Set the inputs of the next step before transformers prepares it; see `Step.begin`."""
    step = _step_of(cache)
    return None if step is None else step.begin(cache, position, tokens, source)


def confirm(cache: DecodeCache, position: int, tokens: int) -> None:
    """Set the position of a step whose inputs `begin` has set without it; see `Step.confirm`."""
    step = _step_of(cache)
    assert step is not None
    step.confirm(cache, position, tokens)


def residents_of(cache: Any) -> Residents | None:
    """The tensors that the last step with this cache read, or None."""
    step = _step_of(cache)
    return None if step is None else step.residents


def all_residents_of(cache: Any) -> list[Residents]:
    """The tensors that steps with this cache read."""
    step = _step_of(cache)
    return [] if step is None else list(step.known.values())


def _step_of(cache: Any) -> Step | None:
    return None if cache is None or type(cache) is tuple else _steps.get(cache)


def _is_step(inputs: Mapping[str, Any], cache: Any) -> bool:
    """Return whether these are the inputs of a step, not of a prompt, with a cache that has static buffers."""
    ids = inputs.get("input_ids")
    return ids is not None and ids.shape[1] <= _longest_step(cache) and getattr(cache, "is_compileable", False)


def _longest_step(cache: Any) -> int:
    """The largest number of tokens in one step with this cache."""
    return cache.longest_step if isinstance(cache, DecodeCache) else 1


_steps: WeakKeyDictionary[Any, Step] = WeakKeyDictionary()
# The number of tokens of every cache at its last refused step.
_refused: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
