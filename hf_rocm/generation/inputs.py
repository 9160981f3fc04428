"""The inputs of decode steps: prepared by transformers once for each call of `generate`, then advanced in place.

transformers prepares every step from the beginning: it looks at signatures and configs, slices and copies, and makes
the masks, most of it while the GPU waits. Here the first step of a call is prepared by transformers and looked at: if
masks and positions are what a sequence with left padding has, the following steps get the same arguments over resident
tensors, advanced right after the step before, while the GPU still computes it. Anything else stays transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_rocm.generation import features
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.masks import Kind, StepMask, Unlike, kinds_of
from hf_rocm.generation.methods import own, put_before
from hf_rocm.generation.resident import settle
from hf_rocm.overlay.bind import GPU, ON

MARK = "_hf_rocm_inputs"  # in a model's __dict__: how far ours reaches
NOTE = "_hf_rocm_inputs_note"  # why the last call's steps were left to transformers

_CLOCKS = ("cache_position", "position_ids")  # what transformers advances by one with every token
_GROWTH = 256  # columns by which the padding mask's memory grows


def switch_on(model: nn.Module, mode: str = ON) -> str | None:
    """Prepare this model's decode steps from here on. Returns why that can't be, or None.

    mode: how far it reaches, as in `overlay.bind`.
    """
    reason = refuses(model)
    if reason is None:
        put_before(type(model), "prepare_inputs_for_generation", _prepare, MARK)
        put_before(type(model), "_update_model_kwargs_for_generation", _update, MARK)
        model.__dict__[MARK] = mode
    return reason


def switch_off(model: nn.Module) -> None:
    """Leave the model's steps to transformers again."""
    model.__dict__.pop(MARK, None)
    model.__dict__.pop(NOTE, None)


def refuses(model: Any) -> str | None:
    """Why the steps of such a model are prepared by transformers, or None."""
    from transformers import GenerationMixin

    cls = type(model)
    if not issubclass(cls, GenerationMixin):
        return "it does not generate"
    if model.config.is_encoder_decoder:
        return "it has an encoder beside its decoder"
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        if own(cls, name, GenerationMixin):
            return f"{cls.__name__} has its own {name}"
    if hasattr(cls, "create_masks_for_generate"):
        return f"{cls.__name__} has its own create_masks_for_generate"
    return features.refuses("decode_inputs")


def noted(model: nn.Module) -> str | None:
    """Why the steps of the model's last call were left to transformers, if they were."""
    note: str | None = model.__dict__.get(NOTE)
    return note


def _prepare(
    model: Any, inherited: Callable[..., dict[str, Any]], input_ids: Tensor, *positional: Any, **arguments: Any
) -> dict[str, Any]:
    """In place of `prepare_inputs_for_generation`: the next step's arguments."""
    cache = arguments.get("past_key_values")
    step = _step_of(cache)
    if step is not None and step.follows(arguments):
        return step.inputs(cache, input_ids)
    inputs = inherited(input_ids, *positional, **arguments)
    if positional or not _is_step(inputs, cache) or (model.__dict__.get(MARK) == GPU and not input_ids.is_cuda):
        return inputs
    tokens = input_ids.shape[1]
    if _refused.get(cache) == tokens - 1:
        _refused[cache] = tokens  # the call that was refused, one token on
        return inputs
    try:
        step = Step(model.config, cache, arguments, inputs, None if step is None else step.residents)
    except Unlike as reason:
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
    """In place of `_update_model_kwargs_for_generation`: what the next step is prepared from."""
    cache = model_kwargs.get("past_key_values")
    step = _step_of(cache)
    if step is None or not step.given_in(model_kwargs):
        return inherited(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
    if num_new_tokens != 1 or outputs.get("past_key_values", cache) is not cache:
        del _steps[cache]
        return inherited(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
    model_kwargs.update(step.advance())
    if isinstance(cache, DecodeCache) and cache.has_room:
        cache.aim()  # now, while the device is busy
    return model_kwargs


class Residents:
    """The tensors that the steps over one cache read, for one batch size, with or without padding.

    like: transformers' arguments of a step. masks: those among them, for `kinds` of layers. rolling: whether sliding
    layers roll when they are full.
    """

    def __init__(
        self, like: Mapping[str, Any], kinds: list[Kind], masks: list[Tensor], *, padded: bool, rolling: bool
    ) -> None:
        ids, positions = like["input_ids"], like.get("position_ids")
        rows = 0 if positions is None else len(positions)
        self.form = _form(like, kinds, masks, padded)
        self.input_ids = settle(torch.empty_like(ids, memory_format=torch.contiguous_format))
        # one tensor, so that one addition advances everything: the position, the kinds' lengths, the rows' positions
        self._clock = torch.zeros(1 + len(kinds) + rows, dtype=torch.int64, device=ids.device)
        self.clocks = {"cache_position": settle(self._clock[:1])}
        if rows:
            self.clocks["position_ids"] = settle(self._clock[1 + len(kinds) :].view(rows, 1))
        self._padding = torch.zeros(len(ids), dtype=torch.int64, device=ids.device) if padded else None
        self._starts = [None if self._padding is None else self._padding.clone() for _ in kinds]
        self._lengths = [self._clock[1 + index : 2 + index] for index in range(len(kinds))]
        self.masks = [
            StepMask(mask, kind.window, length, start, rolls=rolling and kind.window is not None)
            for mask, kind, length, start in zip(masks, kinds, self._lengths, self._starts, strict=True)
        ]

    def set(self, position: int, positions: Tensor | None, padding: Tensor | None) -> None:
        """Begin with the token at this position. positions: what transformers calls it in each row."""
        self._clock[:1].fill_(position)
        if positions is not None:
            self.clocks["position_ids"].copy_(positions)
        if self._padding is not None and padding is not None:
            self._padding.copy_(padding)

    def rebase(self, index: int, position: int, base: int) -> None:
        """Say which position lies in the first row of a kind's buffers."""
        self._lengths[index].fill_(position + 1 - base)
        start = self._starts[index]
        if start is not None:
            assert self._padding is not None
            start.copy_((self._padding - base).clamp(min=0))
        self.masks[index].rebase()

    def advance(self) -> None:
        """One token on."""
        self._clock.add_(1)
        for mask in self.masks:
            mask.refresh()


class Step:
    """The steps of one call of `generate`, the first of which transformers prepared.

    arguments: what transformers prepares the step from; inputs: what it made of them. Raises `Unlike` if this is not
    what comes out of a sequence with left padding: then nothing is known about the steps that follow.
    """

    def __init__(
        self,
        config: Any,
        cache: Any,
        arguments: Mapping[str, Any],
        inputs: Mapping[str, Any],
        residents: Residents | None,
    ) -> None:
        padding_mask, masks = arguments.get("attention_mask"), inputs.get("attention_mask")
        growing = (*_CLOCKS, "attention_mask")
        self._given = {name: arguments[name] for name in growing if arguments.get(name) is not None}
        self._position = _position(cache, inputs)
        _check(arguments, inputs, cache, self._position)
        self._others = {name: each for name, each in arguments.items() if name not in self._given and each is not cache}
        self._count = len(arguments)
        self._kinds = kinds_of(config, masks, cache)
        made = [mask for mask in masks.values() if mask is not None] if isinstance(masks, dict) else [masks]
        padding = _padding(padding_mask)
        if residents is None or residents.form != _form(inputs, self._kinds, made, padding is not None):
            with torch.inference_mode(False), torch.no_grad():  # else nothing outside of it could advance them
                rolling = not isinstance(cache, DecodeCache)
                residents = Residents(inputs, self._kinds, made, padded=padding is not None, rolling=rolling)
        self.residents = residents
        self._bases = [-1] * len(self._kinds)
        with torch.inference_mode(False), torch.no_grad():
            residents.set(self._position, inputs.get("position_ids"), padding)
        if isinstance(cache, DecodeCache):
            cache.aim()
            if any(
                cache.layers[each.layer].capacity != mask.shape[3] for each, mask in zip(self._kinds, made, strict=True)
            ):
                raise Unlike("the attention mask is not as wide as the cache")
        self._settle(cache)
        for mask, kept in zip(made, residents.masks, strict=True):
            if not torch.equal(mask, kept.tensor):
                raise Unlike("the attention mask is not that of a sequence with left padding")
        self._inputs = {name: each for name, each in inputs.items() if each is not cache}
        self._inputs.update({name: each for name, each in residents.clocks.items() if name in self._inputs})
        self._inputs["input_ids"] = residents.input_ids
        self._masked = [name for name, mask in masks.items() if mask is not None] if isinstance(masks, dict) else None
        self._width = _width(padding_mask)
        self._columns: Tensor | None = None
        self._place_masks()

    def given_in(self, arguments: Mapping[str, Any]) -> bool:
        """Whether what advances with every token is what the last step left."""
        return all(arguments.get(name) is each for name, each in self._given.items())

    def follows(self, arguments: Mapping[str, Any]) -> bool:
        """Whether these are the last step's arguments, one token on."""
        return (
            self.given_in(arguments)
            and len(arguments) == self._count
            and all(arguments.get(name) is each for name, each in self._others.items())
        )

    def inputs(self, cache: Any, input_ids: Tensor) -> dict[str, Any]:
        """The step's arguments. input_ids: [B, S], all tokens so far."""
        self._settle(cache)
        self.residents.input_ids.copy_(input_ids[:, -1:])
        inputs = {**self._inputs, "past_key_values": cache}
        if self._masked is not None:
            inputs["attention_mask"] = dict(inputs["attention_mask"])
        return inputs

    def advance(self) -> dict[str, Any]:
        """One token on, on the device too. Returns what transformers prepares the next step from."""
        self._position += 1
        self.residents.advance()
        for name, each in self._given.items():
            self._given[name] = self._grown(each) if name == "attention_mask" else self.residents.clocks[name]
        return self._given

    def _grown(self, padding_mask: Tensor) -> Tensor:
        """The padding mask with one column more, a view of memory that is there already."""
        if self._columns is None or self._width == self._columns.shape[1]:
            self._columns = padding_mask.new_ones((len(padding_mask), self._width + _GROWTH))
            self._columns[:, : self._width] = padding_mask
        self._width += 1
        return self._columns[:, : self._width]

    def _settle(self, cache: Any) -> None:
        """Follow a cache whose buffers moved on."""
        if isinstance(cache, DecodeCache):
            cache.aim()
            layers: list[Any] = [cache.layers[kind.layer] for kind in self._kinds]
            if [layer.capacity for layer in layers] != [mask.tensor.shape[3] for mask in self.residents.masks]:
                self._move(layers)
            bases = [layer.base for layer in layers]
        else:
            bases = [0] * len(self._kinds)  # a full one rolls, which its length says
        if bases != self._bases:
            with torch.inference_mode(False), torch.no_grad():
                for index, base in enumerate(bases):
                    self.residents.rebase(index, self._position, base)
            self._bases = bases

    def _move(self, layers: list[Any]) -> None:
        """Make resident tensors anew for buffers that have grown."""
        old = self.residents
        inputs = {"input_ids": old.input_ids, **{name: old.clocks[name] for name in old.clocks}}
        masks = [
            mask.tensor.new_empty((*mask.tensor.shape[:3], layer.capacity))
            for mask, layer in zip(old.masks, layers, strict=True)
        ]
        padding = old._padding
        with torch.inference_mode(False), torch.no_grad():
            self.residents = Residents(inputs, self._kinds, masks, padded=padding is not None, rolling=False)
            self.residents.set(self._position, inputs.get("position_ids"), padding)
        self._bases = []
        self._inputs.update({name: each for name, each in self.residents.clocks.items() if name in self._inputs})
        self._inputs["input_ids"] = self.residents.input_ids
        self._place_masks()

    def _place_masks(self) -> None:
        tensors = [mask.tensor for mask in self.residents.masks]
        if self._masked is None:
            self._inputs["attention_mask"] = tensors[0]
        else:
            kept = dict(self._inputs["attention_mask"])
            self._inputs["attention_mask"] = {**kept, **dict(zip(self._masked, tensors, strict=True))}


def residents_of(cache: Any) -> Residents | None:
    """What the steps over this cache read, if it had any."""
    step = _step_of(cache)
    return None if step is None else step.residents


def _step_of(cache: Any) -> Step | None:
    return None if cache is None or type(cache) is tuple else _steps.get(cache)


def _is_step(inputs: Mapping[str, Any], cache: Any) -> bool:
    """Whether these are the inputs of a step of one token over static buffers."""
    ids = inputs.get("input_ids")
    return ids is not None and ids.shape[1] == 1 and getattr(cache, "is_compileable", False)


def _check(arguments: Mapping[str, Any], inputs: Mapping[str, Any], cache: Any, position: int) -> None:
    """Raise `Unlike` if a step has arguments whose course through the steps is not known."""
    if type(cache) is not DecodeCache and type(cache).__module__ != "transformers.cache_utils":
        raise Unlike(f"the cache is a {type(cache).__name__}")
    b, masks, padding_mask = len(inputs["input_ids"]), inputs.get("attention_mask"), arguments.get("attention_mask")
    made = [mask for mask in (masks.values() if isinstance(masks, dict) else [masks]) if mask is not None]
    if not made or not all(isinstance(mask, Tensor) and mask.shape[:3] == (b, 1, 1) for mask in made):
        raise Unlike("the step has other masks than one for each kind of layers")
    if padding_mask is not None and (padding_mask.ndim != 2 or len(padding_mask) != b):
        raise Unlike("the attention mask is not one of padding")
    positions = arguments.get("position_ids")
    if positions is None and arguments.get("cache_position") is None:
        raise Unlike("nothing among the arguments tells the step's position")
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != position + 1):
        raise Unlike("the call has position_ids of its own")  # which transformers doesn't count on in every release
    for name in _CLOCKS:
        clock = inputs.get(name)
        if clock is not None and (clock.shape[-1] != 1 or clock.dtype != torch.int64):
            raise Unlike(f"the step's {name} are not those of one token")
    known = {*_CLOCKS, "attention_mask", "input_ids"}
    for name, each in {**arguments, **inputs}.items():
        if name not in known and each is not cache and not (each is None or isinstance(each, (bool, int, str))):
            raise Unlike(f"the step has {name}")


def _position(cache: Any, inputs: Mapping[str, Any]) -> int:
    """The position of the step's token, counted from the rows' first."""
    given = inputs.get("cache_position")
    return int(cache.get_seq_length()) if given is None else int(given[0])


def _padding(padding_mask: Tensor | None) -> Tensor | None:
    """How many padding tokens each row has, or None if there are none. [B] int64."""
    if padding_mask is None:
        return None
    padding = (padding_mask == 0).sum(-1)
    return padding if bool(padding.any()) else None


def _form(like: Mapping[str, Any], kinds: list[Kind], masks: list[Tensor], padded: bool) -> tuple[Any, ...]:
    positions = like.get("position_ids")
    shapes = tuple((tuple(mask.shape), mask.dtype, mask.device) for mask in masks)
    return len(like["input_ids"]), None if positions is None else len(positions), tuple(kinds), shapes, padded


def _width(padding_mask: Any) -> int:
    return padding_mask.shape[1] if isinstance(padding_mask, Tensor) and padding_mask.ndim == 2 else -1


_steps: WeakKeyDictionary[Any, Step] = WeakKeyDictionary()
_refused: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # cache → how many tokens there were at the last refusal
