"""The arguments of decode steps in resident tensors, derived from one step that transformers prepared.

`Residents` has the tensors, which recorded steps read in place. `Step` compares them with the arguments that
transformers prepared for the first step of a call, and advances them for the following steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.masks import Kind, StepMask, Unlike, kinds_of
from hf_rocm.generation.static_buffers import settle

_CLOCKS = ("cache_position", "position_ids")  # arguments that grow by one with every token
_GROWTH = 256  # columns that are allocated ahead for the padding mask


class Step:
    """The steps of one call of `generate`, the first of which transformers prepared.

    arguments: those of `prepare_inputs_for_generation`; inputs: what it returned. residents: the tensors of an earlier
    call over the same cache, used again if their shapes fit. Raises `Unlike` if the inputs are not those of a sequence
    with left padding, because the inputs of the following steps can't be derived then.
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
        self._others = {
            name: value for name, value in arguments.items() if name not in self._given and value is not cache
        }
        self._count = len(arguments)
        self._kinds = kinds_of(config, masks, cache)
        first_masks = [mask for mask in masks.values() if mask is not None] if isinstance(masks, dict) else [masks]
        padding = _padding(padding_mask)
        if residents is None or residents.form != _form(inputs, self._kinds, first_masks, padding is not None):
            # not inference tensors, which can't be advanced outside inference mode
            with torch.inference_mode(False), torch.no_grad():
                rolling = not isinstance(cache, DecodeCache)
                residents = Residents(inputs, self._kinds, first_masks, padded=padding is not None, rolling=rolling)
        self.residents = residents
        self._bases = [-1] * len(self._kinds)
        with torch.inference_mode(False), torch.no_grad():
            residents.set(self._position, inputs.get("position_ids"), padding)
        if isinstance(cache, DecodeCache):
            cache.aim()
            widths = [cache.layers[kind.layer].capacity for kind in self._kinds]
            if any(mask.shape[3] != width for mask, width in zip(first_masks, widths, strict=True)):
                raise Unlike("the attention mask is not as wide as the cache")
        self._settle(cache)
        for mask, resident_mask in zip(first_masks, residents.masks, strict=True):
            if not torch.equal(mask, resident_mask.tensor):
                raise Unlike("the attention mask is not that of a sequence with left padding")
        self._inputs = {name: value for name, value in inputs.items() if value is not cache}
        self._inputs.update({name: clock for name, clock in residents.clocks.items() if name in self._inputs})
        self._inputs["input_ids"] = residents.input_ids
        self._masked = [name for name, mask in masks.items() if mask is not None] if isinstance(masks, dict) else None
        self._width = _width(padding_mask)
        self._columns: Tensor | None = None
        self._place_masks()

    def matches(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the arguments that change with every token are the objects that `advance` returned."""
        return all(arguments.get(name) is value for name, value in self._given.items())

    def follows(self, arguments: Mapping[str, Any]) -> bool:
        """Whether these are the arguments of the last step, advanced by one token."""
        return (
            self.matches(arguments)
            and len(arguments) == self._count
            and all(arguments.get(name) is value for name, value in self._others.items())
        )

    def inputs(self, cache: Any, input_ids: Tensor) -> dict[str, Any]:
        """The arguments of the step. input_ids: [B, S], all tokens so far."""
        self._settle(cache)
        self.residents.tokens = input_ids
        self.residents.input_ids.copy_(input_ids[:, -1:])
        inputs = {**self._inputs, "past_key_values": cache}
        if self._masked is not None:
            inputs["attention_mask"] = dict(inputs["attention_mask"])
        return inputs

    def advance(self) -> dict[str, Any]:
        """Advance by one token, on the device too. Returns the arguments for transformers to prepare the next step."""
        self._position += 1
        self.residents.advance()
        for name, value in self._given.items():
            self._given[name] = self._grown(value) if name == "attention_mask" else self.residents.clocks[name]
        return self._given

    def _grown(self, padding_mask: Tensor) -> Tensor:
        """The padding mask with one more column: a view of memory allocated ahead."""
        if self._columns is None or self._width == self._columns.shape[1]:
            self._columns = padding_mask.new_ones((len(padding_mask), self._width + _GROWTH))
            self._columns[:, : self._width] = padding_mask
        self._width += 1
        return self._columns[:, : self._width]

    def _settle(self, cache: Any) -> None:
        """Update lengths and masks after the cache moved a window or grew a buffer."""
        if isinstance(cache, DecodeCache):
            cache.aim()
            layers: list[Any] = [cache.layers[kind.layer] for kind in self._kinds]
            if [layer.capacity for layer in layers] != [mask.tensor.shape[3] for mask in self.residents.masks]:
                self._move(layers)
            bases = [layer.base for layer in layers]
        else:
            bases = [0] * len(self._kinds)  # a full sliding layer rolls, which follows from its length
        if bases != self._bases:
            with torch.inference_mode(False), torch.no_grad():
                for index, base in enumerate(bases):
                    self.residents.rebase(index, self._position, base)
            self._bases = bases

    def _move(self, layers: list[Any]) -> None:
        """Allocate new resident tensors for buffers that have grown."""
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
        self._inputs.update({name: clock for name, clock in self.residents.clocks.items() if name in self._inputs})
        self._inputs["input_ids"] = self.residents.input_ids
        self._place_masks()

    def _place_masks(self) -> None:
        tensors = [mask.tensor for mask in self.residents.masks]
        if self._masked is None:
            self._inputs["attention_mask"] = tensors[0]
        else:
            masks = self._inputs["attention_mask"]
            self._inputs["attention_mask"] = {**masks, **dict(zip(self._masked, tensors, strict=True))}


class Residents:
    """The tensors that the steps over one cache read, for one batch size, with or without padding.

    like: the arguments of a step as transformers prepared them. masks: the masks among them, one per kind of layers.
    rolling: whether full sliding layers drop their first key for every new one.
    """

    def __init__(
        self, like: Mapping[str, Any], kinds: list[Kind], masks: list[Tensor], *, padded: bool, rolling: bool
    ) -> None:
        ids, positions = like["input_ids"], like.get("position_ids")
        rows = 0 if positions is None else len(positions)
        self.form = _form(like, kinds, masks, padded)
        self.input_ids = settle(torch.empty_like(ids, memory_format=torch.contiguous_format))
        self.tokens: Tensor | None = None  # [B, S], all tokens so far, to recompute earlier steps
        # One tensor, so that one addition advances everything: the position, the length per kind, the position per row.
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
        """Start with the token at `position`.

        positions: its position_ids, [B, 1]. padding: the number of padding tokens per row, [B].
        """
        self._clock[:1].fill_(position)
        if positions is not None:
            self.clocks["position_ids"].copy_(positions)
        if self._padding is not None and padding is not None:
            self._padding.copy_(padding)

    def rebase(self, index: int, position: int, base: int) -> None:
        """Set `base` as the position of the first row in the buffers of one kind of layers."""
        self._lengths[index].fill_(position + 1 - base)
        start = self._starts[index]
        if start is not None:
            assert self._padding is not None
            start.copy_((self._padding - base).clamp(min=0))
        self.masks[index].rebase()

    def advance(self, steps: int = 1) -> None:
        """Advance by `steps` tokens; a negative number goes back."""
        self._clock.add_(steps)
        for mask in self.masks:
            mask.refresh()


def _check(arguments: Mapping[str, Any], inputs: Mapping[str, Any], cache: Any, position: int) -> None:
    """Raise `Unlike` if a step has arguments whose later values can't be derived."""
    if not isinstance(cache, DecodeCache) and type(cache).__module__ != "transformers.cache_utils":
        raise Unlike(f"the cache is a {type(cache).__name__}")
    b, masks, padding_mask = len(inputs["input_ids"]), inputs.get("attention_mask"), arguments.get("attention_mask")
    present = [mask for mask in (masks.values() if isinstance(masks, dict) else [masks]) if mask is not None]
    if not present or not all(isinstance(mask, Tensor) and mask.shape[:3] == (b, 1, 1) for mask in present):
        raise Unlike("the step's masks are not one [B, 1, 1, S] mask for each kind of layers")
    if padding_mask is not None and (padding_mask.ndim != 2 or len(padding_mask) != b):
        raise Unlike("the attention mask is not a [B, S] padding mask")
    positions = arguments.get("position_ids")
    if positions is None and arguments.get("cache_position") is None:
        raise Unlike("the step has neither position_ids nor cache_position")
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != position + 1):
        raise Unlike("the call passes its own position_ids")  # not every release of transformers expects that
    for name in _CLOCKS:
        clock = inputs.get(name)
        if clock is not None and (clock.shape[-1] != 1 or clock.dtype != torch.int64):
            raise Unlike(f"the step's {name} is not for one token")
    known = {*_CLOCKS, "attention_mask", "input_ids"}
    if inputs.get("inputs_embeds") is None:
        known.add("inputs_embeds")  # only the prompt's
    for name, value in {**arguments, **inputs}.items():
        if name not in known and value is not cache and not (value is None or isinstance(value, (bool, int, str))):
            raise Unlike(f"the step has the argument {name}")


def _position(cache: Any, inputs: Mapping[str, Any]) -> int:
    """The position of the step's token, counted from the first token of the rows, padding included."""
    position = inputs.get("cache_position")
    return int(cache.get_seq_length()) if position is None else int(position[0])


def _padding(padding_mask: Tensor | None) -> Tensor | None:
    """The number of padding tokens per row, [B] int64, or None if there are none."""
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
