"""Replacements for `generate` and for methods that it calls. With them, a prepared model decodes with recorded steps.

They are set on the class and not on the model, so that a copy of the model uses its own recordings and a pickle
does not depend on hf_rocm. For models that are not prepared, and for subclasses, they call the inherited methods.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_rocm import options
from hf_rocm.errors import GraphError
from hf_rocm.generation import (
    assistant,
    decide,
    decode_experts,
    deferred_stop,
    inputs,
    lookup,
    loops,
    speculation,
    stop_criteria,
    suspects,
    token_choice,
    user_cache,
    verification,
)
from hf_rocm.generation.assistant import Rounds
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.encoder_decoder import EncoderDecoderDecodeCache, mask_of
from hf_rocm.generation.hybrid import RECURRENT, HybridDecodeCache
from hf_rocm.generation.methods import put_before, take_away
from hf_rocm.generation.model_state import may_examine_early
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.rewind import Attempt, Rewind, last_alarm
from hf_rocm.generation.runner import Runner
from hf_rocm.generation.state import SETTINGS, State, known, refusal, release, state_of
from hf_rocm.generation.user_cache import UserCache
from hf_rocm.options import Switch
from hf_rocm.overlay.bind import ON

Method = Callable[..., Any]


def switch_on(model: Any, graphs: bool | None, mode: str = ON) -> str | None:
    """Enable recorded decode steps for this prepared model. Returns None, or the reason why they are not enabled.

    graphs: True requires recorded steps, False disables them, None follows `HF_ROCM_GRAPHS`. mode: the devices on which
    hf_rocm prepares the inputs of steps, as in `overlay.bind`. Raises `GraphError` if graphs are required and steps
    can't be recorded.
    """
    switch_off(model)
    wanted = wanted_of(graphs)
    required = wanted is Switch.REQUIRED
    reason = "graphs are switched off" if wanted is Switch.OFF else decide.refuses_model(model)
    reason = reason or decide.refuses_ranks(model) or suspects.refuses(model.device, required=required)
    if reason is None:
        put_before(model, _METHODS, SETTINGS)
        model.__dict__[SETTINGS] = {"required": required}
        inputs.switch_on(model, mode)
    elif required:
        raise refusal(type(model).__name__, reason)
    return reason


def wanted_of(graphs: bool | None) -> Switch:
    """The argument `graphs` as a switch; None means the value of `HF_ROCM_GRAPHS`."""
    return options.current().graphs if graphs is None else Switch.REQUIRED if graphs else Switch.OFF


def switch_off(model: nn.Module) -> None:
    """Free the caches and recordings of a model, and restore stock decoding."""
    release(model)
    take_away(model, SETTINGS)
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
) -> None:
    state = state_of(self)
    passed = model_kwargs.get("past_key_values") is not None
    rounds = assistant.rounds_of(self, generation_config)
    if rounds is not None and passed:
        # This is not the first round.
        if rounds.cache is None:
            stock(generation_config, model_kwargs, mode, batch_size, max_cache_length, *rest)
        else:
            rounds.cache.reserve(max_cache_length + 1)
        return
    windows = _served(self, state, generation_config, model_kwargs, mode, rounds)
    drafts = _mode(generation_config, mode) == speculation.MODE
    user: UserCache | None = None
    if windows is None or passed or (generation_config.return_dict_in_generate and rounds is None):
        stock(generation_config, model_kwargs, mode, batch_size, max_cache_length, *rest)
        if windows is None:
            return
        passed_cache = model_kwargs.get("past_key_values")
        user = UserCache(user_cache.cache_of_forward(self) if passed_cache is None else passed_cache, passed=passed)
        result = user.refuses() or user.windows(windows)
        if drafts and not isinstance(result, str):
            result = speculation.refuses_windows(generation_config, result, returned=True) or result
        if isinstance(result, str):
            state.turn_away(result)
            return
        windows = result
    encoded = model_kwargs.get("encoder_outputs") if self.config.is_encoder_decoder else None
    mask = None if encoded is None else mask_of(self, model_kwargs.get("attention_mask"), encoded)
    if isinstance(mask, str):
        state.turn_away(mask)
        if user is None:
            stock(generation_config, model_kwargs, mode, batch_size, max_cache_length, *rest)
        return
    # generate repeats every row this many times, in some releases only after this point
    rows = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if mask is not None and len(mask) == batch_size:
        mask = mask.repeat_interleave(rows, dim=0)
    state.calls += 1
    seen = user.length if user is not None and passed else 0
    cache = state.pool.take(
        windows,
        batch=batch_size * rows,
        prompt=(_prompt(model_kwargs) if encoded is None else 0) + seen,
        limit=max_cache_length + 1 + seen if rounds is None else max(max_cache_length + 1, rounds.limit),
        kind=_kind(windows) if encoded is None else EncoderDecoderDecodeCache,
        encoded=0 if encoded is None else encoded[0].shape[1],
    )
    if isinstance(cache, EncoderDecoderDecodeCache):
        cache.begin(mask, additive=self.config.get_text_config(decoder=True)._attn_implementation == "eager")
    cache.hooks = RemovableHandle.next_id
    if drafts:
        cache.drafts = generation_config.prompt_lookup_num_tokens or 0
    if rounds is not None:
        rounds.begin(cache, generation_config.max_new_tokens or 0)
    if user is not None:
        user.load(cache)
    model_kwargs["past_key_values"] = cache


def _served(
    self: Any, state: State, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, rounds: Rounds | None
) -> Sequence[int | None] | None:
    """The windows of the layers, or None if the call uses transformers' own cache; the reason is recorded."""
    mode = _mode(generation_config, mode)
    reason = state.disabled or ("the call passes a custom_generate loop" if _thread.own_loop else None)
    if model_kwargs.get("past_key_values") is not None and _thread.observer is not None:
        reason = reason or f"the call passes a cache, which its {_thread.observer} may read"
    reason = reason or decide.refuses_device(self)
    reason = reason or suspects.refuses(self.device, required=state.required)
    reason = reason or decide.refuses_call(self, generation_config, model_kwargs, mode, _thread.assistant)
    if rounds is not None:
        reason = reason or rounds.refuses(generation_config)
    elif getattr(generation_config, "is_assistant", False):
        reason = reason or "the model that it drafts for is not prepared, or runs uncaptured in this call"
    if not Agreement(self).all(reason is None):
        reason = reason or "another rank runs this call uncaptured"
    windows = reason or decide.windows(self)
    if rounds is not None and not isinstance(windows, str):
        windows = rounds.refuses_windows(windows) or windows
    if mode == speculation.MODE and not isinstance(windows, str):
        windows = speculation.refuses_windows(generation_config, windows) or windows
    if not isinstance(windows, str):
        return windows
    state.turn_away(windows)
    return None


def _kind(windows: Sequence[int | None]) -> type[DecodeCache]:
    return HybridDecodeCache if RECURRENT in windows else DecodeCache


def _mode(generation_config: Any, mode: Any) -> Any:
    """The `GenerationMode` of a call. mode: this mode, or, up to transformers 4.53, the call's assistant model."""
    from transformers.generation.configuration_utils import GenerationMode

    return mode if isinstance(mode, GenerationMode) else generation_config.get_generation_mode(mode)


def _generate(self: Any, stock: Method, *args: Any, **kwargs: Any) -> Any:
    """Replaces `generate`: records the call's loop, assistant and tokenizer, and user code that may read its cache."""
    before = _thread.own_loop, _thread.observer, _thread.assistant, _thread.translated
    call = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
    _thread.own_loop = kwargs.get("custom_generate") is not None
    _thread.observer = user_cache.observers(call)
    _thread.assistant = call.get("assistant_model")
    _thread.translated = kwargs.get("assistant_tokenizer") is not None
    try:
        return stock(*args, **kwargs)
    finally:
        _thread.own_loop, _thread.observer, _thread.assistant, _thread.translated = before


# The parameters of `generate` that may be passed by position, up to the last one that is read here.
_POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
)


class _Thread(threading.local):
    """This thread's call to `generate`: custom loop, user code that may read the cache, assistant, other tokenizer."""

    own_loop = False
    observer: str | None = None
    assistant: Any = None
    translated = False


_thread = _Thread()


def _prompt(model_kwargs: dict[str, Any]) -> int:
    """The number of prompt tokens per row, read from the shapes of the arguments; 0 if they do not determine it."""
    for name, dim in (("inputs_embeds", 1), ("attention_mask", -1)):
        if model_kwargs.get(name) is not None:
            length: int = model_kwargs[name].shape[dim]
            return length
    return 0


def _valid_auto_compile_criteria(self: Any, stock: Method, model_kwargs: dict[str, Any], generation_config: Any) -> Any:
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, DecodeCache):
        # With drafts, `loops` runs the recorded steps when the loop calls the model.
        return cache.drafts is None
    return stock(model_kwargs, generation_config)


def _get_compiled_call(self: Any, stock: Method, compile_config: Any) -> Any:
    def step(**arguments: Any) -> Any:
        cache = arguments.get("past_key_values")
        if not isinstance(cache, DecodeCache):
            return stock(compile_config)(**arguments)
        if cache.runner is None:
            if SETTINGS not in self.__dict__:
                return self(**arguments)
            cache.runner = Runner(state_of(self), cache)
        return cache.runner(self, arguments)

    return step


def _sample(self: Any, stock: Method, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(kwargs.get("past_key_values"), DecodeCache):
        with deferred_stop.stopping_on_time():
            return stock(input_ids, *args, **kwargs)
    rounds = assistant.rounds_of(self, kwargs.get("generation_config"))
    if rounds is not None and rounds.cache is kwargs["past_key_values"]:
        return rounds.decode(stock, input_ids, args, kwargs)
    return _decoded(self, _sampled, stock, input_ids, args, kwargs)


def _loop(self: Any, stock: Method, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaces the loops that call the model directly: beam search and assisted decoding."""
    if not isinstance(kwargs.get("past_key_values"), DecodeCache):
        return stock(input_ids, *args, **kwargs)
    return _decoded(self, _looped, stock, input_ids, args, kwargs)


def _decoded(
    self: Any, loop: Method, stock: Method, input_ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a loop of `generate` with recorded steps, and again without those of a model whose replay was wrong."""
    attempt = Attempt(input_ids, args, kwargs, _thread.assistant)
    while True:
        try:
            result = _decode(self, loop, stock, input_ids, args, attempt)
            rewind = next(filter(None, (last_alarm(cache, model) for model, cache in attempt.caches(self))), None)
        except Rewind as raised:
            rewind = raised
        if rewind is None:
            break
        attempt.take_back(rewind)
    result = user_cache.store(result, attempt.cache)
    # After an error, the caches may be in any state, so they are not returned to the pool.
    for model, cache in attempt.caches(self):
        state = known(model)
        if state is not None and state.disabled is None:
            state.pool.put(cache)
    return result


def _decode(self: Any, loop: Method, stock: Method, input_ids: Tensor, args: Sequence[Any], attempt: Attempt) -> Any:
    try:
        return loop(self, stock, input_ids, args, attempt)
    except GraphError:
        # Replays may have been wrong, so the user's cache is left unchanged.
        raise
    except BaseException:
        # User code raised this error. As in stock transformers, the user's cache contains the tokens so far.
        user_cache.store(None, attempt.cache)
        raise
    finally:
        attempt.cache.choice = attempt.cache.runner = None


def _sampled(self: Any, stock: Method, input_ids: Tensor, args: Sequence[Any], attempt: Attempt) -> Any:
    arguments, cache = attempt.arguments, attempt.cache
    if not args:
        cache.choice = token_choice.of_call(self, arguments)
        arguments = {**arguments, **stop_criteria.of_sampling(arguments, cache.choice)}
        if cache.choice is not None and may_examine_early(self, input_ids, attempt.arguments):
            cache.runner = Runner(state_of(self), cache, early=True)
    with deferred_stop.stopping_late(input_ids, attempt.arguments) as late:
        result = stock(input_ids, *args, **arguments)
    if late is not None:
        result = _without_last(result, late.undone, cache) if late.undone else result
        late.restore((result if isinstance(result, Tensor) else result.sequences).shape[1])
    return result


def _looped(self: Any, stock: Method, input_ids: Tensor, args: Sequence[Any], attempt: Attempt) -> Any:
    step = _get_compiled_call(self, stock, None)
    arguments, cache, lookahead = attempt.arguments, attempt.cache, None
    attempt.rounds = None if cache.drafts is None else _rounds(self, cache)
    if cache.drafts is not None:
        step = speculation.verifying(step)
        if not args:
            cache.choice = verification.of_call(self, arguments, _thread.observer, attempt.rounds)
            criteria = stop_criteria.replacement(arguments, cache.choice and cache.choice.tokens)
            arguments = {**arguments, **criteria}
            lookahead = cache.choice.lookahead if cache.choice and criteria else None
    with (
        deferred_stop.stopping_on_time(),
        loops.stepping(self, cache, lambda arguments: step(**arguments)),
        assistant.drafting(attempt.rounds),
        lookup.searching_on_the_host(lookahead),
    ):
        result = stock(input_ids, *args, **arguments)
    if lookahead is not None:
        lookahead.end(cache.length)
    return result


def _rounds(self: Any, cache: DecodeCache) -> Rounds | None:
    """The rounds of the assistant of this thread's call, if it has one that is prepared."""
    if _thread.assistant is None:
        return None
    drafting = decide.generator_of(_thread.assistant)
    if SETTINGS not in drafting.__dict__:
        state_of(self).plain_assistants += 1
        return None
    return Rounds(drafting, self, limit=cache.limit, translated=_thread.translated, observed=bool(_thread.observer))


def _without_last(result: Any, steps: int, cache: DecodeCache) -> Any:
    """Remove the last steps from the cache and from the result of `_sample`. Returns the result."""
    cache.crop(-steps)
    if isinstance(result, Tensor):
        return result[:, :-steps]
    result.sequences = result.sequences[:, :-steps]
    for name in ("scores", "logits"):
        if result.get(name):
            setattr(result, name, result[name][:-steps])
    return result


def _has_unfinished_sequences(self: Any, stock: Method, this_peer_finished: Any, *args: Any, **kwargs: Any) -> Any:
    late = deferred_stop.current()
    if late is not None:
        late.begin_step()
    # From 5.17 on, `this_peer_finished` is a bool, because the decision has already been made.
    if late is None or isinstance(this_peer_finished, bool):
        return stock(this_peer_finished, *args, **kwargs)
    return late.continues(this_peer_finished)


_METHODS: dict[str, Method] = {
    "_prepare_cache_for_generation": _prepare_cache_for_generation,
    "_valid_auto_compile_criteria": _valid_auto_compile_criteria,
    "get_compiled_call": _get_compiled_call,
    "generate": _generate,
    "_sample": _sample,
    "_beam_search": _loop,
    "_assisted_decoding": _loop,
    "_has_unfinished_sequences": _has_unfinished_sequences,
    "_optimize_model_for_decode": decode_experts.switching,
}
