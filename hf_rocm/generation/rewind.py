"""Repeat a call to `generate` if a replay is found to be wrong after its tokens were used.

The loop of the call (`_sample`, for example) runs again, uncaptured, with a new cache and from its initial random
state, so it returns the result of an uncaptured call. It begins at the prompt and not at the last verified step,
because a stale pointer may have written to any row of the cache, and because the results for earlier tokens are rounded
differently in a prompt than in steps. Tokens that a streamer has received can't be withdrawn. The new tokens are
compared with them, and a difference raises an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm.errors import GraphError
from hf_rocm.generation import incident, random_state
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.state import known

NOT_FINITE = "a replayed step returned logits that are not finite, and no uncaptured step did"

# transformers' processors that keep state between steps or call a user's function.
_STATEFUL = {
    "DiaEOSDelayPatternLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
}


class Rewind(GraphError):
    """Raised by a step, and caught by the function that runs the loop of `generate`.

    reason: the difference. unproven: the number of steps since the last verified one.
    """

    def __init__(self, reason: str, unproven: int, ranks: Agreement) -> None:
        super().__init__(
            "a replayed step was wrong", facts={"reason": reason, "steps since the last verified one": unproven}
        )
        self.reason = reason
        self.unproven = unproven
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return (GraphError, (self.message,))


class Attempt:
    """One call of a loop of `generate`, and the state that is needed to repeat it.

    keywords: the keyword arguments of the call. assistant: its assistant model, or None. `arguments`: the same
    arguments with the streamer wrapped. rounds: the rounds in which the assistant drafts with recorded steps, or None.
    """

    def __init__(
        self, input_ids: Tensor, positional: tuple[Any, ...], keywords: Mapping[str, Any], assistant: Any = None
    ) -> None:
        self.arguments = dict(keywords)
        self._positional = bool(positional)
        self._streamer: RecordingStreamer | None = None
        if keywords.get("streamer") is not None:
            self._streamer = self.arguments["streamer"] = RecordingStreamer(keywords["streamer"])
        self.rounds: Any = None
        # the state that transformers changes during the call: the length of drafts, and the candidate generator, which
        # generate creates before the loop in releases up to 4.56
        generator = keywords.get("candidate_generator")
        changing = [getattr(assistant, "generation_config", None), generator]
        changing.append(getattr(generator, "generation_config", None))
        self._attributes = [(one, _copied(vars(one))) for one in changing if one is not None]
        self._random: list[tuple[Any, Tensor]] = []
        if getattr(keywords.get("generation_config"), "do_sample", False):
            devices = {input_ids.device, getattr(assistant, "device", input_ids.device)}
            self._random = [pair for device in devices for pair in random_state.states(device)]

    @property
    def cache(self) -> DecodeCache:
        cache: DecodeCache = self.arguments["past_key_values"]
        return cache

    def caches(self, model: Any) -> list[tuple[Any, DecodeCache]]:
        """The caches that hf_rocm created for the call, with their models: this model, and its assistant."""
        rounds = self.rounds
        return [(model, self.cache)] + (
            [] if rounds is None or rounds.cache is None else [(rounds.model, rounds.cache)]
        )

    def take_back(self, rewind: Rewind) -> None:
        """Restore the state at the beginning of the call. Raises `GraphError` on every rank if any rank can't."""
        reason = self._refuses(rewind.ranks)
        if not rewind.ranks.all(reason is None):
            facts = {
                "reason": rewind.reason,
                "tokens that may be wrong": f"those of the last {rewind.unproven} steps, in every row",
                "why they remain": reason or "another rank can't withdraw them",
            }
            raise GraphError("a replayed step was wrong, and its tokens can't be withdrawn", facts=facts, hint=_HINT)
        for generator, state in self._random:
            generator.set_state(state)
        for changed, attributes in self._attributes:
            vars(changed).clear()
            vars(changed).update(_copied(attributes))
        self.arguments["past_key_values"] = self.cache.fresh()
        if self._streamer is not None:
            self._streamer.compare_again()

    def _refuses(self, ranks: Agreement) -> str | None:
        if self._positional or self.arguments.get("synced_gpus"):
            return "the call was not made by generate, or it sets synced_gpus"
        if self._streamer is not None and ranks.group is not None:
            return "a streamer on one of several ranks has received them"
        for piece in _processors(self.arguments):
            kind = type(piece)
            if kind.__module__.split(".")[0] not in ("transformers", "hf_rocm") or kind.__name__ in _STATEFUL:
                return f"{kind.__name__} has received them and may keep state"
        return None


_HINT = "call generate again: this model now runs uncaptured; set HF_ROCM_GRAPHS=0 for other processes"


class RecordingStreamer:
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


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """These attributes of an object, with copies of lists and dictionaries."""
    return {name: copy.copy(value) if type(value) in (list, dict) else value for name, value in attributes.items()}


def _processors(arguments: Mapping[str, Any]) -> Iterable[Any]:
    """The call's logits processors and stopping criteria."""
    return (*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ()))


def last_alarm(cache: DecodeCache, model: Any) -> Rewind | None:
    """At the end of a call, return a `Rewind` if a replay since the last comparison raised the alarm, else None.

    In the first case, recording is disabled for this model.
    """
    steps = [step for step in cache.recordings.values() if isinstance(step, RecordedStep) and step.schedule.since]
    if not steps:
        return None
    ranks = Agreement(model)
    if ranks.all(not any(step.alarm.triggered() for step in steps)):
        return None
    unproven = sum(step.schedule.in_call for step in steps)
    incident.keep(model, reason=NOT_FINITE, operators=0, replays=steps[-1].schedule.replays, unproven=unproven)
    state = known(model)
    if state is not None and state.disabled is None:
        state.wrong_replay = NOT_FINITE
        state.disable(NOT_FINITE)
    return Rewind(NOT_FINITE, unproven, ranks)
