"""The arguments of decode steps in resident tensors, derived from one step that transformers prepared.

`Step` compares the tensors that recorded steps read in place (`residents`) with the arguments that transformers
prepared for the first step of a call, and advances them for the following steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.masks import Kind, UnsupportedStep, kinds_of
from hf_rocm.generation.residents import Form, Residents, Source

# Arguments whose values increase by one with every token.
_CLOCKS = ("cache_position", "position_ids")
# Arguments that only some steps have.
_OF_ONE_STEP = ("next_sequence_length", "is_first_iteration")
# Columns of the padding mask that are allocated in advance.
_GROWTH = 256


class Step:
    """The steps of one call to `generate`, the first of which transformers prepared.

    arguments: the arguments of `prepare_inputs_for_generation`. inputs: its result. known: the tensors of earlier calls
    with the same cache, reused if their shapes match. Raises `UnsupportedStep` if the inputs of the following steps
    can't be derived from these, for example because the mask is not that of a sequence with left padding.

    In a call that verifies drafts, the number of tokens of a step varies, and its position is the length of the cache.
    transformers would extend the arguments in `_CLOCKS` and the padding mask for every draft, so `advance` removes
    them. The same applies to the steps of an assistant, but every round of drafts is a separate call to `generate`, and
    `resume` receives these arguments again in every round after the first.
    """

    def __init__(
        self,
        config: Any,
        cache: Any,
        arguments: Mapping[str, Any],
        inputs: Mapping[str, Any],
        known: dict[Form, Residents],
    ) -> None:
        padding_mask, masks = arguments.get("attention_mask"), inputs.get("attention_mask")
        self._given = _growing(arguments)
        self.verifies = verifies(cache)
        self._use = getattr(cache, "uses", None)
        self._position = _position(cache, inputs)
        _check(arguments, inputs, cache, self._position)
        varying = {*self._given, *_OF_ONE_STEP}
        self._others = {name: value for name, value in arguments.items() if name not in varying and value is not cache}
        self._count = _count(arguments)
        self._removed = self._prepared = False
        kinds = tuple(kinds_of(config, masks, cache))
        first_masks = [mask for mask in masks.values() if mask is not None] if isinstance(masks, dict) else [masks]
        self._padding = _padding(padding_mask)
        self._form = _form(inputs, kinds, first_masks, cache, padded=self._padding is not None)
        ids, positions = inputs["input_ids"], inputs.get("position_ids")
        self._origin = None if positions is None else positions[:, :1] - self._position
        self._inputs = {name: value for name, value in inputs.items() if value is not cache}
        self._masked = [name for name, mask in masks.items() if mask is not None] if isinstance(masks, dict) else None
        self.known = known
        # Number of tokens → tensors and inputs.
        self._placed: dict[int, tuple[Residents, dict[str, Any]]] = {}
        self.residents: Residents
        if self._rows(cache, ids.shape[1])[0] != self._form.widths:
            raise UnsupportedStep("the attention mask is not as wide as the cache")
        self._settle(cache, ids.shape[1])
        for mask, resident_mask in zip(first_masks, self.residents.masks, strict=True):
            if not torch.equal(mask, resident_mask.tensor):
                raise UnsupportedStep("the attention mask is not that of a sequence with left padding")
        clock = self.residents.clocks.get("position_ids")
        if positions is not None and clock is not None and ids.shape[1] > 1 and not torch.equal(positions, clock):
            raise UnsupportedStep("the step's position_ids are not consecutive")
        self._width = _width(padding_mask)
        self._columns: Tensor | None = None

    def matches(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the growing arguments are those of the last step; with drafts, whether a step was prepared."""
        if self.verifies:
            return self._prepared
        return all(arguments.get(name) is value for name, value in self._given.items())

    def lacks(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether these arguments of a call that verifies drafts lack the ones that `advance` removed."""
        return self._removed and not any(name in arguments for name in self._given)

    def follows(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether these are the arguments of the next step."""
        return (
            (self.lacks(arguments) if self.verifies else self.matches(arguments))
            and _count(arguments) == self._count - len(self._given) * self._removed
            and self._has_others(arguments)
        )

    def resumes(self, cache: Any, arguments: Mapping[str, Any], input_ids: Tensor) -> bool:
        """Return whether these are the arguments of the first step in the next round of an assistant.

        transformers has extended the growing arguments to cover all tokens so far. May wait for the device.
        """
        given = _growing(arguments)
        if not self.verifies or self._use != cache.uses or given.keys() != self._given.keys():
            return False
        if _count(arguments) != self._count or not self._has_others(arguments):
            return False
        first, last = int(cache.get_seq_length()), input_ids.shape[1]
        columns = torch.arange(last, device=input_ids.device)
        expected = {"cache_position": columns[first:]}
        if self._origin is not None:
            expected["position_ids"] = columns[first:] + self._origin
        if "attention_mask" in given:
            padding = 0 if self._padding is None else self._padding[:, None]
            expected["attention_mask"] = (columns >= padding).expand(len(input_ids), -1)
        return 0 < first < last and all(
            value.shape[-1] in (last, last - first)
            and name in expected
            and torch.equal(value[..., -expected[name].shape[-1] :].to(expected[name].dtype), expected[name])
            for name, value in given.items()
        )

    def resume(self, cache: Any, arguments: Mapping[str, Any]) -> None:
        """Begin the next round of an assistant with arguments that `resumes` has accepted."""
        self._given = _growing(arguments)
        self._removed = self._prepared = False
        self._position = int(cache.get_seq_length())

    def _has_others(self, arguments: Mapping[str, Any]) -> bool:
        return all(arguments.get(name) is value for name, value in self._others.items()) and not arguments.get(
            "is_first_iteration"
        )

    def tokens(self, input_ids: Tensor) -> int:
        """The number of tokens of the step. input_ids: [B, S], all tokens so far, including drafts."""
        return input_ids.shape[1] - self._position if self.verifies else 1

    def inputs(self, cache: Any, input_ids: Tensor) -> dict[str, Any]:
        """The arguments of the step. input_ids: [B, S], all tokens so far, including drafts."""
        tokens = self.tokens(input_ids)
        lookahead = cache.choice.lookahead if self.verifies and cache.choice else None
        launched = lookahead is not None and lookahead.prepares(self._position, input_ids)
        placed = self._placed[tokens][1] if launched else self._settle(cache, tokens)
        self.residents.follow(None if self.verifies else input_ids)
        # A cache of transformers has no `choice`.
        rows = getattr(getattr(cache, "choice", None), "rows", None)
        if not launched and (rows is None or not rows.copied(input_ids, self.residents.input_ids)):
            _copy(input_ids[:, -tokens:], self.residents.input_ids)
        if rows is not None:
            rows.step_ids = self.residents.input_ids
        inputs = {**placed, "past_key_values": cache}
        if self._masked is not None:
            inputs["attention_mask"] = dict(inputs["attention_mask"])
        self._prepared = True
        return inputs

    def begin(self, cache: DecodeCache, position: int | None, tokens: int, source: Source) -> Tensor | None:
        """Set the inputs of the next step, which verifies drafts, before transformers prepares it.

        position: the number of tokens before the step; None if it is only on the device. The cache may contain more
        tokens, which transformers removes before the step. tokens: the number of tokens of the step. source: where
        these tokens are on the device. Returns the tokens, [1, N]; None if the inputs can't be set yet.
        """
        length = cache.length
        if not self._removed or (position is not None and position > length):
            return None
        if position is None:
            return self._begin_unknown(cache, tokens, source)
        self._position = position
        cache.level(position)
        try:
            if not cache.has_room(tokens):
                return None
            self._settle(cache, tokens, source)
        finally:
            cache.level(length)
        return self.residents.input_ids

    def _begin_unknown(self, cache: DecodeCache, tokens: int, source: Source) -> Tensor | None:
        if tokens not in self._placed:
            return None
        residents, _ = self._placed[tokens]
        layers = [cache.layers[kind.layer] for kind in self._form.kinds]
        # the cache's length includes all tokens of the last step, so the position is at most this length
        room = cache.has_room(tokens) and residents.form.widths == tuple(layer.capacity for layer in layers)
        if not room or residents.bases != tuple(layer.base for layer in layers):
            return None
        residents.write(None, cache.relative_places(), source)
        return residents.input_ids

    def confirm(self, cache: DecodeCache, position: int, tokens: int) -> None:
        """Set the position of a step whose inputs `begin` has set without it. cache, tokens: those of `begin`."""
        length = cache.length
        self._position = position
        self.residents, _ = self._placed[tokens]
        self.residents.position = position
        cache.level(position)
        cache.places(tokens)
        cache.level(length)

    def advance(self, cache: Any, arguments: dict[str, Any]) -> None:
        """Advance the tensors, and the arguments from which the next step is prepared, by one token.

        In a call that verifies drafts, remove the growing arguments instead.
        """
        if self.verifies:
            if not self._removed:
                self._given = {name: value[..., : self._position + 1] for name, value in self._given.items()}
            for name in self._given:
                arguments.pop(name, None)
            self._removed, self._prepared = True, False
            # The masks are set when the number of drafts is known.
            self._position = int(cache.get_seq_length())
            return
        self._position += 1
        is_decode_cache = isinstance(cache, DecodeCache)
        places = cache.places(1) if is_decode_cache and cache.has_room() else ()
        # This runs while the device is busy.
        self.residents.write(self._position, places)
        for name, value in self._given.items():
            self._given[name] = self._grown(value) if name == "attention_mask" else self.residents.clocks[name]
        arguments.update(self._given)

    def restored(self, arguments: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Return the arguments of a step that transformers prepares, with those that `advance` removed.

        length: the number of tokens that the added arguments cover.
        """
        self._prepared = True
        result = dict(arguments)
        for name, value in self._given.items():
            if name == "cache_position":
                result[name] = torch.arange(self._position, length, device=value.device)
                continue
            added = torch.arange(1, length - value.shape[1] + 1, device=value.device).expand(len(value), -1)
            added = torch.ones_like(added) if name == "attention_mask" else value[:, -1:] + added
            result[name] = torch.cat((value, added.to(value.dtype)), dim=1)
        return result

    def _grown(self, padding_mask: Tensor) -> Tensor:
        """The padding mask with one more column, as a view of memory that was allocated in advance."""
        if self._columns is None or self._width == self._columns.shape[1]:
            self._columns = padding_mask.new_ones((len(padding_mask), self._width + _GROWTH))
            self._columns[:, : self._width] = padding_mask
        self._width += 1
        return self._columns[:, : self._width]

    def _rows(self, cache: Any, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For every kind of layer, the number of keys that attention receives and the position of the first one."""
        # The mask of a sliding layer that rolls has no base.
        if not isinstance(cache, DecodeCache):
            return self._form.widths, (0,) * len(self._form.kinds)
        cache.make_room(tokens)
        layers = [cache.layers[kind.layer] for kind in self._form.kinds]
        return tuple(layer.capacity for layer in layers), tuple(layer.base for layer in layers)

    def _settle(self, cache: Any, tokens: int, source: Source | None = None) -> dict[str, Any]:
        """The inputs of a step of this many tokens at the current position. source: as in `Residents.write`.

        The cache may have moved a window or grown a buffer since the last step.
        """
        widths, bases = self._rows(cache, tokens)
        residents, placed = self._placed.get(tokens) or (None, {})
        if residents is None or residents.form.widths != widths:
            residents = self._take(tokens, widths)
            placed = self._place(residents)
            self._placed[tokens] = residents, placed
        rebased = residents.bases != bases
        if rebased:
            with torch.inference_mode(False), torch.no_grad():
                residents.rebase(bases)
        places = cache.places(tokens) if isinstance(cache, DecodeCache) else ()
        if rebased or places or source is not None or residents.position != self._position:
            residents.write(self._position, places, source)
        self.residents = residents
        return placed

    def _take(self, tokens: int, widths: tuple[int, ...]) -> Residents:
        """The tensors for steps of this many tokens: the tensors of an earlier call, or new ones."""
        for form in [form for form in self.known if form.widths != widths]:
            # The buffers have grown since these tensors were created.
            del self.known[form]
        form = self._form._replace(tokens=tokens, widths=widths)
        # not inference tensors, which can't be advanced outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            if form not in self.known:
                self.known[form] = Residents(form)
            self.known[form].set(self._position, self._origin, self._padding)
        return self.known[form]

    def _place(self, residents: Residents) -> dict[str, Any]:
        placed = dict(self._inputs)
        placed.update({name: clock for name, clock in residents.clocks.items() if name in placed})
        placed["input_ids"] = residents.input_ids
        tensors = [mask.tensor for mask in residents.masks]
        if self._masked is None:
            placed["attention_mask"] = tensors[0]
        else:
            placed["attention_mask"] = {**placed["attention_mask"], **dict(zip(self._masked, tensors, strict=True))}
        return placed


def _copy(tokens: Tensor, place: Tensor) -> None:
    """Copy tokens with a kernel, because a memory copy between two kernels leaves a GPU idle for several µs."""
    if tokens.device == place.device:
        torch.add(tokens, 0, out=place)
    else:
        place.copy_(tokens)


def _growing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that transformers extends for every token."""
    return {name: arguments[name] for name in (*_CLOCKS, "attention_mask") if arguments.get(name) is not None}


def _count(arguments: Mapping[str, Any]) -> int:
    return len(arguments) - sum(name in arguments for name in _OF_ONE_STEP)


def verifies(cache: Any) -> bool:
    """Return whether the cache belongs to a call that verifies drafts."""
    return isinstance(cache, DecodeCache) and cache.drafts is not None


def _check(arguments: Mapping[str, Any], inputs: Mapping[str, Any], cache: Any, position: int) -> None:
    """Raise `UnsupportedStep` if a step has arguments whose later values can't be derived."""
    if not isinstance(cache, DecodeCache) and type(cache).__module__ != "transformers.cache_utils":
        raise UnsupportedStep(f"the cache is of type {type(cache).__name__}")
    b, n = inputs["input_ids"].shape
    masks, padding_mask = inputs.get("attention_mask"), arguments.get("attention_mask")
    present = [mask for mask in (masks.values() if isinstance(masks, dict) else [masks]) if mask is not None]
    if not present or not all(isinstance(mask, Tensor) and mask.shape[:3] == (b, 1, n) for mask in present):
        raise UnsupportedStep("the step's masks are not one [B, 1, S_q, S] mask for each kind of layer")
    if padding_mask is not None and (padding_mask.ndim != 2 or len(padding_mask) != b):
        raise UnsupportedStep("the attention mask is not a [B, S] padding mask")
    positions = arguments.get("position_ids")
    if positions is None and arguments.get("cache_position") is None:
        raise UnsupportedStep("the step has neither position_ids nor cache_position")
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != position + n):
        # Not all releases of transformers support this.
        raise UnsupportedStep("the call passes its own position_ids")
    for name in _CLOCKS:
        clock = inputs.get(name)
        if clock is not None and (clock.shape[-1] != n or clock.dtype != torch.int64):
            raise UnsupportedStep(f"the step's {name} does not match its tokens")
    known = {*_CLOCKS, "attention_mask", "input_ids"}
    if inputs.get("inputs_embeds") is None:
        # Only the prompt uses the embeddings.
        known.add("inputs_embeds")
    for name, value in {**arguments, **inputs}.items():
        if name not in known and value is not cache and not (value is None or isinstance(value, (bool, int, str))):
            raise UnsupportedStep(f"the step has the argument {name}")


def _position(cache: Any, inputs: Mapping[str, Any]) -> int:
    """The position of the step's first token, counted from the first token of the rows, padding included."""
    position = inputs.get("cache_position")
    return int(cache.get_seq_length()) if position is None else int(position[0])


def _padding(padding_mask: Tensor | None) -> Tensor | None:
    """The number of padding tokens per row, [B] int64, or None if there are none."""
    if padding_mask is None:
        return None
    padding = (padding_mask == 0).sum(-1)
    return padding if bool(padding.any()) else None


def _form(inputs: Mapping[str, Any], kinds: tuple[Kind, ...], masks: list[Tensor], cache: Any, *, padded: bool) -> Form:
    ids, positions = inputs["input_ids"], inputs.get("position_ids")
    return Form(
        batch=len(ids),
        tokens=ids.shape[1],
        rows=0 if positions is None else len(positions),
        kinds=kinds,
        widths=tuple(mask.shape[3] for mask in masks),
        dtypes=(ids.dtype, *(mask.dtype for mask in masks)),
        device=ids.device,
        padded=padded,
        rolling=not isinstance(cache, DecodeCache),
    )


def _width(padding_mask: Any) -> int:
    return padding_mask.shape[1] if isinstance(padding_mask, Tensor) and padding_mask.ndim == 2 else -1
