"""Repeat a call of `generate` if a replay turns out to be wrong after its tokens were used.

The loop of the call (`_sample`, for example) runs again, uncaptured, over a new cache and from its initial random
state, so it returns the result of an uncaptured call. It begins at the prompt and not at the last proven step, because
a stale pointer may have written to any row of the cache, and a prompt that includes earlier tokens rounds differently
from the steps of these tokens. Tokens that a streamer has received can't be withdrawn. The new tokens are compared with
them, and a difference raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm.errors import GraphError
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.rank_consensus import Agreement

# transformers' processors that keep state between steps or call a user's function.
_STATEFUL = {
    "DiaEOSDelayPatternLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
}


class Rewind(GraphError):
    """Raised by a step and caught around `_sample`.

    reason: the difference. unproven: the number of steps since the last proven one.
    """

    def __init__(self, reason: str, unproven: int, ranks: Agreement) -> None:
        super().__init__("a replayed step was wrong", facts={"reason": reason, "steps since the last proven": unproven})
        self.reason = reason
        self.unproven = unproven
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return (GraphError, (self.message,))


class Attempt:
    """One call of a loop of `generate`, and the state that is needed to repeat it.

    given: the keyword arguments of the call. `arguments`: the same arguments with the streamer wrapped.
    """

    def __init__(self, input_ids: Tensor, positional: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        self.arguments = dict(given)
        self._positional = bool(positional)
        self._streamer: Received | None = None
        if given.get("streamer") is not None:
            self._streamer = self.arguments["streamer"] = Received(given["streamer"])
        assistant = getattr(given.get("assistant_model"), "generation_config", None)
        self._settings = None if assistant is None else (assistant, dict(vars(assistant)))
        self._random: list[tuple[Any, Tensor]] = []
        if getattr(given.get("generation_config"), "do_sample", False):
            self._random = list(_random_states(input_ids.device))

    @property
    def cache(self) -> DecodeCache:
        cache: DecodeCache = self.arguments["past_key_values"]
        return cache

    def take_back(self, rewind: Rewind) -> None:
        """Restore the state at the beginning of the call. Raises `GraphError` on every rank if any rank can't."""
        reason = self._refuses(rewind.ranks)
        if not rewind.ranks.all(reason is None):
            facts = {
                "reason": rewind.reason,
                "tokens that may be wrong": f"the last {rewind.unproven} of a row",
                "why they stay": reason or "another rank can't withdraw them",
            }
            raise GraphError("a replayed step was wrong, and its tokens can't be withdrawn", facts=facts, hint=_HINT)
        for generator, state in self._random:
            generator.set_state(state)
        if self._settings is not None:  # transformers stores the adapted length of drafts there
            vars(self._settings[0]).clear()
            vars(self._settings[0]).update(self._settings[1])
        self.arguments["past_key_values"] = self.cache.fresh()
        if self._streamer is not None:
            self._streamer.compare_again()

    def _refuses(self, ranks: Agreement) -> str | None:
        if self._positional or self.arguments.get("synced_gpus"):
            return "the call was not made by generate, or runs in step with other processes"
        if hasattr(self.arguments.get("candidate_generator"), "assistant_model"):  # created by generate up to 4.53
            return "the assistant model has received them"
        if self._streamer is not None and ranks.group is not None:
            return "a streamer on one of several ranks has received them"
        for piece in _processors(self.arguments):
            kind = type(piece)
            if kind.__module__.split(".")[0] not in ("transformers", "hf_rocm") or kind.__name__ in _STATEFUL:
                return f"{kind.__name__} has received them and may keep state"
        return None


_HINT = "call generate again: this model now runs uncaptured; set HF_ROCM_GRAPHS=0 for other processes"


class Received:
    """Wraps a user's streamer and records the values that it has received."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._values: list[Tensor] = []
        self._again: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        if self._again:
            if not torch.equal(self._again.pop(0), value):
                self._raise()
            return
        self._values.append(value.clone())
        self._streamer.put(value)

    def end(self) -> None:
        if self._again:
            self._raise()
        self._streamer.end()

    def compare_again(self) -> None:
        """Compare the next values with those that the user's streamer has received, instead of passing them on."""
        self._again = list(self._values)

    def _raise(self) -> None:
        raise GraphError("a replayed step was wrong, and the streamer has received its tokens", hint=_HINT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)


def _processors(arguments: Mapping[str, Any]) -> Iterable[Any]:
    """The call's logits processors and stopping criteria."""
    return (*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ()))


def _random_states(device: torch.device) -> Iterable[tuple[Any, Tensor]]:
    """The random generators that sampling on this device may use, with their states."""
    yield torch.default_generator, torch.default_generator.get_state()
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        yield generator, generator.get_state()
