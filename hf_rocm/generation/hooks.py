"""Where transformers asks for a cache and for its compiled step: methods set on the class of a prepared model.

On the class and not on the model, so that a copy of the model finds its own recordings and a pickle has nothing of
ours in it. An instance that isn't marked, or of a subclass, gets what it would get without us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hf_rocm import options
from hf_rocm.generation import decide, deferral, inputs
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.methods import put_before
from hf_rocm.generation.runner import Runner
from hf_rocm.generation.state import SETTINGS, State, known, refusal, release, state_of
from hf_rocm.options import Switch
from hf_rocm.overlay.bind import ON

Method = Callable[..., Any]


def switch_on(model: nn.Module, graphs: bool | None, mode: str = ON) -> str | None:
    """Have a prepared model decode over recorded steps from here on.

    graphs: True raises where it can't be, None goes by `HF_ROCM_GRAPHS`, False switches it off. mode: how far the
    preparation of the steps' inputs reaches, as in `overlay.bind`. Returns why it is off, or None. Raises `GraphError`.
    """
    switch_off(model)
    wanted = options.current().graphs if graphs is None else Switch.REQUIRED if graphs else Switch.OFF
    reason = "graphs are switched off" if wanted is Switch.OFF else decide.refuses_model(model)
    reason = reason or decide.refuses_ranks(model)
    if reason is None:
        for name, method in _METHODS.items():
            put_before(type(model), name, method, SETTINGS)
        model.__dict__[SETTINGS] = {"required": wanted is Switch.REQUIRED}
        inputs.switch_on(model, mode)
    elif wanted is Switch.REQUIRED:
        raise refusal(type(model).__name__, reason)
    return reason


def switch_off(model: nn.Module) -> None:
    """Give back what is kept for a model, and let it decode as stock does."""
    release(model)
    if model.__dict__.pop(SETTINGS, None) is not None:
        inputs.switch_off(model)


def _prepare_cache_for_generation(
    self: Any,
    stock: Method,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    mode: Any,
    batch_size: int,
    max_cache_length: int,
    *rest: Any,
) -> Any:
    state = state_of(self)
    windows = _served(self, state, generation_config, model_kwargs, mode)
    if windows is None:
        return stock(generation_config, model_kwargs, mode, batch_size, max_cache_length, *rest)
    state.calls += 1
    model_kwargs["past_key_values"] = state.pool.take(
        windows,
        batch=batch_size * (generation_config.num_return_sequences or 1),
        prompt=_prompt(model_kwargs),
        limit=max_cache_length + 1,
    )
    return None


def _served(
    self: Any, state: State, generation_config: Any, model_kwargs: dict[str, Any], mode: Any
) -> Sequence[int | None] | None:
    """The windows of the layers, or None and the reason noted: then the call keeps transformers' own cache."""
    from transformers.generation.configuration_utils import GenerationMode

    if not isinstance(mode, GenerationMode):  # the assistant model, up to 4.53
        mode = generation_config.get_generation_mode(mode)
    reason = state.disabled or ("the call brings a loop of its own" if _brings_a_loop() else None)
    reason = reason or decide.refuses_device(self)
    reason = reason or decide.refuses_call(self, generation_config, model_kwargs, mode)
    windows = reason or decide.windows(self)
    if not isinstance(windows, str):
        return windows
    state.turn_away(windows)
    return None


def _generate(self: Any, stock: Method, *args: Any, **kwargs: Any) -> Any:
    """A loop of the user's own may do anything with its cache."""
    before = _brings_a_loop()
    _thread.own_loop = kwargs.get("custom_generate") is not None
    try:
        return stock(*args, **kwargs)
    finally:
        _thread.own_loop = before


def _brings_a_loop() -> bool:
    return getattr(_thread, "own_loop", False)


_thread = threading.local()


def _prompt(model_kwargs: dict[str, Any]) -> int:
    """Tokens of a row, as far as can be seen before they are looked at."""
    for name, dim in (("inputs_embeds", 1), ("attention_mask", -1)):
        if model_kwargs.get(name) is not None:
            length: int = model_kwargs[name].shape[dim]
            return length
    return 0


def _valid_auto_compile_criteria(self: Any, stock: Method, model_kwargs: dict[str, Any], generation_config: Any) -> Any:
    if isinstance(model_kwargs.get("past_key_values"), DecodeCache):
        return True
    return stock(model_kwargs, generation_config)


def _get_compiled_call(self: Any, stock: Method, compile_config: Any) -> Any:
    runner: Runner | None = None

    def step(**arguments: Any) -> Any:
        nonlocal runner
        cache = arguments.get("past_key_values")
        if not isinstance(cache, DecodeCache):
            return stock(compile_config)(**arguments)
        if runner is None or runner.cache is not cache:
            if SETTINGS not in self.__dict__:  # restored meanwhile
                return self(**arguments)
            runner = Runner(state_of(self), cache)
        return runner(self, arguments)

    return step


def _sample(self: Any, stock: Method, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, DecodeCache):
        with deferral.stopping_as_ever():
            return stock(input_ids, *args, **kwargs)
    with deferral.stopping_late(input_ids, kwargs) as late:
        tokens = stock(input_ids, *args, **kwargs)
    state = known(self)  # None if the model was restored meanwhile
    if state is not None and state.disabled is None:
        state.pool.give(cache)  # not after an error, which may have left anything in it
    return tokens if late is None or not late.undone else tokens[:, : -late.undone]


def _has_unfinished_sequences(self: Any, stock: Method, this_peer_finished: Any, *args: Any, **kwargs: Any) -> Any:
    late = deferral.current()
    if late is None or isinstance(this_peer_finished, bool):  # from 5.17 on the decision was taken before
        return stock(this_peer_finished, *args, **kwargs)
    return late.goes_on(this_peer_finished)


_METHODS: dict[str, Method] = {
    "_prepare_cache_for_generation": _prepare_cache_for_generation,
    "_valid_auto_compile_criteria": _valid_auto_compile_criteria,
    "get_compiled_call": _get_compiled_call,
    "generate": _generate,
    "_sample": _sample,
    "_has_unfinished_sequences": _has_unfinished_sequences,
}
