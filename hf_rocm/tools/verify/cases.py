"""The inputs of verify: one row, padded rows, calls on a filled cache, and a row longer than the sliding window."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_rocm.tools.verify.model_under_test import DECODER, ENCODER, PAIR, Subject

PROMPT, PADDED, FILLED, STATIC, WINDOW = "prompt", "padded batch", "filled cache", "static cache", "sliding window"
TITLES = {
    PROMPT: "one row, all layers",
    PADDED: "rows of different lengths, then tokens one by one",
    FILLED: "several and single tokens on a filled cache",
    STATIC: "the same on a static cache",
    WINDOW: "a row longer than the sliding window",
}
# The largest number of positions that are compared per call, in all rows together: the last ones of each row.
KEPT = 96


@dataclass(frozen=True, eq=False)
class Step:
    """One call. ids: [B, S]. mask: [B, start + S] or None. positions: [B, S] or None. start: the number of keys before
    the call."""

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    start: int = 0

    @property
    def keep(self) -> Tensor:
        """[B, S] bool: the positions to compare, without those of padding tokens."""
        real = torch.ones_like(self.ids, dtype=torch.bool)
        if self.mask is not None:
            real = self.mask[:, -self.ids.shape[1] :].bool()
        real[:, : -KEPT // len(real)] = False
        return real


@dataclass(frozen=True, eq=False)
class Case:
    """A sequence of calls. cache: None, `dynamic` or `static`. window: the sliding window to set, or None."""

    name: str
    steps: tuple[Step, ...]
    cache: str | None = None
    window: int | None = None
    # Additional arguments of every call.
    further: dict[str, Tensor] = field(default_factory=dict)

    @property
    def title(self) -> str:
        single_call = self.name == PADDED and len(self.steps) == 1
        return "rows of different lengths" if single_call else TITLES[self.name]

    def run(
        self,
        subject: Subject,
        dtype: torch.dtype,
        record: Callable[[int, Any], None],
        within: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Call the model for every step.

        dtype: the dtype of the cache. record: a function that is called with the number of each step and the model's
        output. within: a function that returns a context manager for a step.
        """
        model: Any = subject.model
        with torch.inference_mode(False), torch.no_grad(), _window(subject, self.window):
            past = _cache(subject, self, dtype)
            for number, step in enumerate(self.steps):
                with within(number):
                    output = model(**_arguments(subject, step, past), **self._further(subject))
                record(number, output)

    def final_keep(self, number: int) -> Tensor:
        """Return [B, S] bool: the positions to compare in a call's output, which are the decoder's if there is one."""
        decoder = self.further.get("decoder_input_ids")
        return self.steps[number].keep if decoder is None else torch.ones_like(decoder, dtype=torch.bool)

    def _further(self, subject: Subject) -> dict[str, Tensor]:
        return {name: value.to(subject.device) for name, value in self.further.items()}


def cases(subject: Subject, ids: Tensor, *, quick: bool) -> dict[str, Case | str]:
    """Map names to cases, or to the reason why a case isn't run, as a sentence. ids: [S] tokens of a text."""
    length = min(32 if quick else 64, max(8, len(ids) // 2))
    named: dict[str, Case | str] = {PROMPT: _prompt(subject, ids, length), PADDED: _padded(subject, ids, length)}
    if subject.kind != DECODER:
        reason = f"the model is an {subject.kind}; only decoders are checked with a filled cache"
        named[FILLED] = named[STATIC] = reason
    else:
        named[FILLED] = _chunks(FILLED, ids, length, "dynamic")
        named[STATIC] = _chunks(STATIC, ids, length, "static")
    named[WINDOW] = _past_window(subject, ids, quick=quick)
    return named


def _prompt(subject: Subject, ids: Tensor, length: int) -> Case:
    return Case(PROMPT, (Step(ids[None, :length]),), further=_decoder_inputs(subject, ids, 1))


def _padded(subject: Subject, ids: Tensor, length: int) -> Case:
    """Return a case of rows that are padded on the left for a decoder, as generate requires, else on the right."""
    lengths = (length, length // 2 + 1, max(3, length // 5))
    rows = torch.stack([ids.roll(-place)[:length] for place in range(3)])
    mask = torch.zeros_like(rows)
    for row, real in enumerate(lengths):
        if subject.kind == DECODER:
            mask[row, length - real :] = 1
        else:
            mask[row, :real] = 1
    if subject.kind != DECODER:
        return Case(PADDED, (Step(rows, mask),), further=_decoder_inputs(subject, ids, 3))
    steps = [Step(rows, mask, _positions(mask, length))]
    for number in range(4):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        following = torch.stack([ids[(place * 5 + number) % len(ids)] for place in range(3)])[:, None]
        steps.append(Step(following, mask, _positions(mask, 1), length + number))
    return Case(PADDED, tuple(steps), "dynamic")


def _chunks(name: str, ids: Tensor, length: int, cache: str) -> Case:
    """Return a case: a prompt, then calls with 5, 1, 1, 3 and 1 tokens, or with 1, 2 and 1 if `length` is below 12."""
    steps, start = [], 0
    for size in (length - 11, 5, 1, 1, 3, 1) if length > 11 else (length - 4, 1, 2, 1):
        chunk = ids[None, start : start + size]
        positions = torch.arange(start, start + size)[None]
        steps.append(Step(chunk, torch.ones(1, start + size, dtype=torch.long), positions, start))
        start += size
    return Case(name, tuple(steps), cache)


def _past_window(subject: Subject, ids: Tensor, *, quick: bool) -> Case | str:
    own = window_of(subject)
    if own is None:
        return "the model has no sliding window"
    limit = 32 if quick else 1024
    window = own if own <= limit else 16
    needed = 2 * window + 3
    row = ids.repeat(needed // len(ids) + 1)[:needed]
    steps = [Step(row[None, :-3], None, None, 0)]
    if subject.kind == DECODER:
        for start in range(needed - 3, needed):
            mask = torch.ones(1, start + 1, dtype=torch.long)
            steps.append(Step(row[None, start : start + 1], mask, torch.tensor([[start]]), start))
    cache = "dynamic" if subject.kind == DECODER else None
    return Case(WINDOW, tuple(steps), cache, None if window == own else window)


def window_of(subject: Subject) -> int | None:
    """Return the sliding window of the model's layers, or None if no layer has one."""
    config = subject.text_config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not isinstance(window, int) or getattr(config, "use_sliding_window", True) is False:
        return None
    return None if kinds and "sliding_attention" not in kinds else window


@contextmanager
def _window(subject: Subject, window: int | None) -> Iterator[None]:
    """Set this window within the block, in the config and in the layers that copied it. None changes nothing."""
    owners: list[Any] = [subject.text_config, *subject.model.modules()] if window else []
    own = [(owner, value) for owner in owners if isinstance(value := vars(owner).get("sliding_window"), int)]
    try:
        for owner, _ in own:
            owner.sliding_window = window
        yield
    finally:
        for owner, value in own:
            owner.sliding_window = value


def _arguments(subject: Subject, step: Step, past: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input_ids": step.ids.to(subject.device)}
    if step.mask is not None:
        arguments["attention_mask"] = step.mask.to(subject.device)
    if past is None:
        return {**arguments, "use_cache": False} if subject.kind != ENCODER else arguments
    cache_position = torch.arange(step.start, step.start + step.ids.shape[1], device=subject.device)
    positions = cache_position[None] if step.positions is None else step.positions.to(subject.device)
    return {
        **arguments,
        "position_ids": positions,
        "cache_position": cache_position,
        "past_key_values": past,
        "use_cache": True,
    }


def _cache(subject: Subject, case: Case, dtype: torch.dtype) -> Any:
    import transformers

    if case.cache is None:
        return None
    # given the config, newer releases cache only the window of sliding layers, as in generate
    if case.cache == "dynamic":
        takes_config = "config" in inspect.signature(transformers.DynamicCache.__init__).parameters
        return transformers.DynamicCache(config=subject.text_config) if takes_config else transformers.DynamicCache()
    known = inspect.signature(transformers.StaticCache.__init__).parameters
    batch, total = len(case.steps[0].ids), sum(step.ids.shape[1] for step in case.steps)
    offered = {
        "config": subject.text_config,
        "max_batch_size": batch,
        "max_cache_len": total + 5,
        "device": subject.device,
        "dtype": dtype,
    }
    return transformers.StaticCache(**{name: value for name, value in offered.items() if name in known})


def _decoder_inputs(subject: Subject, ids: Tensor, rows: int) -> dict[str, Tensor]:
    if subject.kind != PAIR:
        return {}
    return {"decoder_input_ids": ids.repeat(-(-6 * rows // len(ids)))[-6 * rows :].reshape(rows, 6)}


def _positions(mask: Tensor, last: int) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, -last:]
