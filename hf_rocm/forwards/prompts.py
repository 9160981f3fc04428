"""Record prompts: forwards of a model that generates, with an empty `DecodeCache` or without a cache.

The recorded forward fills a separate cache. Its keys and values are then copied to the cache of the call. So the
recordings belong to the model like those of an encoder, whichever cache a call uses. In `generate`, prompts of
different lengths are padded on the right to the same length: in causal attention, no token attends to a later one, and
the keys and values of the padding are not copied.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import options
from hf_rocm.forwards.padding import Padded, Padding, bucket_of, extended
from hf_rocm.forwards.runner import NOT_RUN, Kind, run
from hf_rocm.forwards.state import state_of
from hf_rocm.generation import decide
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.cache_layer import Layer
from hf_rocm.generation.hybrid import RECURRENT
from hf_rocm.generation.state import SETTINGS as STEPS
from hf_rocm.generation.step import Unrecordable
from hf_rocm.generation.user_cache import cache_of_forward
from hf_rocm.generation.watch import strings_of
from hf_rocm.layers.cached_attention import Slot, slot
from hf_rocm.ops.custom_op import compiling
from hf_rocm.weights import shuffled_copy

# The largest number of tokens in all rows. The GPU takes longer for a longer prompt than the host takes to launch it.
_MOST_TOKENS = 4096

# The arguments of a prompt that may be recorded. All others must be empty.
_TENSORS = ("input_ids", "attention_mask", "position_ids", "cache_position")
_PLAIN = ("past_key_values", "use_cache", "logits_to_keep", "return_dict")

# Kinds of rotary embeddings whose angles depend on the length of the prompt.
_DYNAMIC = {"dynamic", "longrope"}


def generator_in(model: nn.Module) -> tuple[str, Any] | None:
    """Return the name and the module of the model whose decode steps are recorded, or None if there is none."""
    generator: Any = decide.generator_of(model) if hasattr(model, "generate") else model
    if STEPS not in generator.__dict__ or generator.config.is_encoder_decoder:
        return None
    return next((pair for pair in model.named_modules() if pair[1] is generator), None)


def forward(self: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the forward of a model that generates."""
    # nn.DataParallel creates new replicas on every call.
    if args or compiling() or "_is_replica" in self.__dict__ or not _is_prompt(kwargs):
        return stock(*args, **kwargs)
    state, cache = state_of(self), kwargs.get("past_key_values")
    windows: Any = decide.windows(self) if cache is None else cache.windows
    reason = state.disabled or _refuses(self, kwargs, windows)
    if reason is not None:
        state.turn_away(reason)
        return stock(**kwargs)
    arguments = {name: value for name, value in kwargs.items() if name != "past_key_values"}
    if cache is None:
        pads, finish = None, partial(_returned, self)
    else:
        pads, finish = PADDING, partial(_stored, cache, kwargs["input_ids"].shape[1])
    kind = Kind(("prompt", *windows), pads, "output", finish)
    output = run(self, state, partial(_kept, stock, windows), (), arguments, kind)
    return stock(**kwargs) if output is NOT_RUN else output


def _is_prompt(arguments: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of a prompt of several tokens. Takes less than a microsecond."""
    cache, ids = arguments.get("past_key_values"), arguments.get("input_ids")
    if ids is not None and ids.shape[-1] == 1:
        return False
    if cache is None:
        return _keeps_one(arguments) and _creates_by_config()
    return type(cache) is DecodeCache and not cache.length and cache.replays_prompt


def _keeps_one(arguments: Mapping[str, Any]) -> bool:
    """Return whether the forward returns the logits of the last token only. A tensor would contain indices."""
    kept = arguments.get("logits_to_keep")
    return type(kept) is int and kept == 1


@functools.cache
def _creates_by_config() -> bool:
    """Whether a forward without a cache creates a `DynamicCache` for the model's config: from 4.56 on."""
    from transformers import DynamicCache

    return "config" in inspect.signature(DynamicCache).parameters


def _refuses(model: Any, arguments: Mapping[str, Any], windows: Sequence[int | None] | str) -> str | None:
    """Return why a prompt with these arguments is not recorded, or None. windows: as `decide.windows` returns them."""
    if isinstance(windows, str):
        return windows
    if RECURRENT in windows:
        return "a prompt begins the states of its recurrent layers"
    for name, value in arguments.items():
        if name not in (*_TENSORS, *_PLAIN) and not _is_empty(value):
            return f"the prompt has the argument {name}"
    ids = arguments.get("input_ids")
    if ids is None or ids.ndim != 2:
        return "the prompt has no input_ids of shape [B, S]"
    if ids.numel() > _MOST_TOKENS:
        return f"prompts of more than {_MOST_TOKENS} tokens are not recorded"
    if not _keeps_one(arguments):
        return "the prompt returns more than the logits of its last token"
    if not arguments.get("return_dict", model.config.return_dict):
        return "the prompt returns a tuple"
    if shuffled_copy.in_use():
        return "weights in this process have shuffled copies, which a prompt updates if the weights have changed"
    used = arguments.get("use_cache")
    if used is None:
        used = model.config.get_text_config(decoder=True).use_cache
    return None if used else "the prompt has use_cache=False"


def _is_empty(value: Any) -> bool:
    """Return whether this is None, False, or a dict without other values."""
    return value is None or value is False or (type(value) is dict and all(map(_is_empty, value.values())))


class PromptCache(DecodeCache):
    """A cache that references the keys and values of one prompt instead of copying them."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__(windows, capacity=0, limit=0)

    def _write_prompt(self, layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layer.keys, layer.values, layer.rows = key, value, key.shape[2]
        return key, value

    def _rows_of_prompt(self, layer: Layer, key: Tensor, value: Tensor) -> Slot | None:
        keys, values = key.new_empty(key.shape), value.new_empty(value.shape)

        def written() -> None:
            self._write_prompt(layer, keys, values)

        return Slot(keys, values, None, written)


def _kept(stock: Callable[..., Any], windows: Sequence[int | None], **arguments: Any) -> dict[str, Any]:
    """Run a prompt. Returns the model's output without the cache, and every layer's keys and values, or None."""
    cache = PromptCache(windows)
    result = stock(**arguments, past_key_values=cache)
    if not isinstance(result, dict) or result.get("past_key_values") is not cache:
        raise Unrecordable(f"the prompt returns its cache in a {type(result).__name__}, or not at all")
    kind: Any = type(result)
    output = kind(**{name: None if value is cache else value for name, value in result.items()})
    layers = [None if layer.keys is None else (layer.keys, layer.values) for layer in cache.layers]
    return {"output": output, "layers": layers}


def _stored(cache: DecodeCache, length: int, kept: Mapping[str, Any]) -> Any:
    """Copy the keys and values of a prompt of `length` tokens to an empty cache. Returns the model's output."""
    for index, layer in enumerate(kept["layers"]):
        if layer is not None:
            cache.load(index, *layer, seen=length)
    return _with(cache, kept["output"])


def _returned(model: Any, kept: Mapping[str, Any]) -> Any:
    """Copy the keys and values of a prompt to a cache like the one that the model's forward creates."""
    cache = cache_of_forward(model)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for index, layer in enumerate(kept["layers"]):
        if layer is None:
            continue
        keys, values = layer
        rows = slot(cache, index, keys, values, {})
        if rows is None or rows.written is None:
            cache.update(keys.clone(), values.clone(), index, {"cache_position": _counted(keys[0, 0, :, 0])})
            continue
        targets += rows.keys, rows.values
        sources += layer
        rows.written()
    if targets:
        # This takes a few launches on a GPU, not one per tensor.
        torch._foreach_copy_(targets, sources)
    return _with(cache, kept["output"])


def _with(cache: Any, output: Any) -> Any:
    """Return this output with a cache."""
    return type(output)(**{**output, "past_key_values": cache})


def _refuses_padding(model: Any) -> str | None:
    """Return why the prompts of this model are not padded, or None."""
    config = model.config.get_text_config(decoder=True)
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "the model's attention is not causal"
    if getattr(config, "max_position_embeddings", None) is None:
        return "the model's config has no max_position_embeddings"
    if _DYNAMIC.intersection(value for _, value in strings_of(config)):
        return "the angles of its rotary embeddings depend on the length of the prompt"
    return None


def _pad(model: Any, stock: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Padded | None:
    """Return the padded form of a prompt, or None if it is not padded."""
    ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
    rows, length = ids.shape
    bucket = bucket_of(length)
    most = min(model.config.get_text_config(decoder=True).max_position_embeddings, _MOST_TOKENS // rows)
    if bucket == length or bucket > most or rows * bucket > options.current().pad_tokens:
        return None
    if positions is None or positions.ndim != 2:
        return None
    further = bucket - length
    given = {name: kwargs[name] for name in _TENSORS if kwargs.get(name) is not None}
    padded = {name: _continued(tensor, further) for name, tensor in given.items()}
    padded["input_ids"] = extended(ids, bucket, 0)
    if "attention_mask" in given:
        padded["attention_mask"] = extended(given["attention_mask"], bucket, 1)
    padded["logits_to_keep"] = ids.new_full((1,), length - 1)
    return Padded(length, bucket, {**kwargs, **padded}, partial(_is_plain, given))


def _continued(positions: Tensor, further: int) -> Tensor:
    """Return positions [..., S] with `further` more, each one larger than the one before."""
    return torch.cat((positions, positions[..., -1:] + torch.arange(1, further + 1, device=positions.device)), dim=-1)


def _is_plain(given: Mapping[str, Tensor]) -> bool:
    """Return whether no token of a prompt is masked, and its positions are 0, 1, … Waits for the device."""
    plain = [
        tensor == 1 if name == "attention_mask" else tensor == _counted(tensor)
        for name, tensor in given.items()
        if name != "input_ids"
    ]
    return bool(torch.stack([same.all() for same in plain]).all())


def _counted(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[-1], device=positions.device)


# A decoder has fewer norms per layer than an encoder. Some models scale their logits down.
PADDING = Padding(_refuses_padding, _pad, roundings=8, least=1e-3)
