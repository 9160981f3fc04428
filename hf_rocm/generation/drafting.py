"""The drafts of an assistant, without a call of its `generate` for every round.

transformers drafts a few tokens in every round, and calls the assistant's `generate` for them. This call copies and
validates configs, creates criteria and masks, and waits for the device after every token, which takes several times as
long as the assistant's recorded steps. Here one such call determines which criteria stop a round. The following rounds
replay the same steps in a row: each step reads its token where the previous one wrote it, and the host checks the
criteria for a token while the device already computes the next one.

This applies to greedy decoding with transformers' unchanged candidate generator, if both models are on one device, no
logits processor acts, and no user code runs between two rounds. All other rounds call `generate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import features
from hf_rocm.generation.methods import own
from hf_rocm.generation.residents import Source
from hf_rocm.generation.runner import Runner
from hf_rocm.overlay.dependencies import of_method
from hf_rocm.overlay.replacements import Watch

FEATURE = "drafting"


class RoundSettings(NamedTuple):
    """The settings of a call to the assistant's `generate` that hold for all rounds.

    ends: its EOS tokens. limit: the largest sequence length that does not exceed the assistant's positions, or None.
    padding: the padding token, which transformers masks in calls without a mask if it is not an EOS token, or None.
    """

    ends: frozenset[int]
    limit: int | None
    padding: int | None


def settings_of(model: Any, arguments: Mapping[str, Any], *, length: int) -> RoundSettings | None:
    """Return the settings of a round that runs transformers' loop; None if the following rounds must run it too.

    model: the assistant. arguments: the keyword arguments of its `_sample`. length: the number of tokens so far.
    """
    from transformers import (
        EosTokenCriteria,
        GenerationMixin,
        LogitsProcessorList,
        MaxLengthCriteria,
        StoppingCriteriaList,
    )

    if any(own(type(model), name, GenerationMixin) for name in _SKIPPED):
        return None
    processors, criteria = arguments.get("logits_processor"), arguments.get("stopping_criteria")
    if type(processors) is not LogitsProcessorList or any(_acts(processor, length) for processor in processors):
        return None
    if arguments["generation_config"].do_sample:
        return None
    if type(criteria) is not StoppingCriteriaList or not {*map(type, criteria)} <= {*_criteria()}:
        return None
    tokens = [one.eos_token_id.flatten().tolist() for one in criteria if type(one) is EosTokenCriteria]
    limits = [one.max_position_embeddings for one in criteria if type(one) is MaxLengthCriteria]
    ends: frozenset[int] = frozenset().union(*tokens)
    padding = getattr(arguments["generation_config"], "_pad_token_tensor", None)
    masked = None if padding is None or int(padding) in ends else int(padding)
    return RoundSettings(ends, min((limit for limit in limits if limit is not None), default=None), masked)


def may_skip(model: Any) -> bool:
    """Whether rounds of this assistant may run without `generate`: the functions that they skip are not replaced."""
    return features.refuses(FEATURE) is None and _watch().holds() and _SKIPPED.isdisjoint(model.__dict__)


_SKIPPED = frozenset(
    (
        "generate",
        "_sample",
        "_get_logits_processor",
        "_get_stopping_criteria",
        "prepare_inputs_for_generation",
        "_update_model_kwargs_for_generation",
    )
)


def _criteria() -> tuple[type, ...]:
    """The criteria that may stop a round."""
    from transformers import EosTokenCriteria, MaxLengthCriteria
    from transformers.generation.stopping_criteria import ConfidenceCriteria

    return MaxLengthCriteria, EosTokenCriteria, ConfidenceCriteria


def _lengths() -> tuple[Any, Any]:
    """The processors that enforce a minimum length, which `generate` also creates for a minimum of 0 new tokens."""
    from transformers import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

    return MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor


def _acts(processor: Any, length: int) -> bool:
    """Whether a processor may change the logits of a sequence of this length or of a longer one."""
    of_sequence, of_new_tokens = _lengths()
    kind: Any = type(processor)
    if kind is of_sequence:
        return bool(processor.min_length > length)
    if kind is of_new_tokens:
        return bool(processor.prompt_length_to_skip + processor.min_new_tokens > length)
    return True


@cache
def _watch() -> Watch:
    """Watches the functions of criteria and processors that a round skips, and all functions that they call."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    kinds = (StoppingCriteriaList, LogitsProcessorList, *_criteria(), *_lengths())
    return Watch([reference for kind in kinds for reference in of_method(kind, "__call__", called=Tensor)])


class Drafts:
    """Drafts tokens with the recorded steps of an assistant. runner: that of the call."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # The values of the drafts that `of` returned last, and of the next round.
        self._values: list[_Values] = []
        self._spare: list[_Values] = []
        # The values of the last draft of a round, if they were not read.
        self._unread: list[_Values] = []
        # The next round.
        self._begun: Begun | None = None

    def of(
        self,
        settings: RoundSettings,
        input_ids: Tensor,
        count: int,
        *,
        threshold: float,
        begun: Begun | None = None,
    ) -> tuple[Tensor, list[float]] | None:
        """Return input_ids, [1, S], followed by up to `count` drafts, and their probabilities.

        A draft that is an EOS token, or whose probability is below the threshold, is the last one. If there are `count`
        drafts, the probability of the last one is missing: see `last_probability`. A threshold of 0 has no effect, and
        there are no probabilities. begun: the round that `begin` has begun with the same tokens, or None.

        Returns None if the steps can't be replayed; the cache is then unchanged.
        """
        kv, length = self._runner.cache, input_ids.shape[1]
        start: int = kv.length
        current = begun
        if current is None or not current.serves(start, length, count):
            current = Begun((input_ids,), start, count)
        if not self._may_launch(settings, current, count):
            return None
        current.resize(count)
        if current.drafts:
            kv.level(length + current.drafts - 1)
        probabilities: list[float] = []
        reads = bool(threshold or settings.ends)
        for index in range(count):
            if index == current.drafts and not self._launch(current, settings):
                kv.level(start)
                return None
            # The device computes this step while the host checks the draft of the previous one.
            if not index or not reads:
                continue
            token, probability = self._spare[index - 1].read()
            if threshold:
                probabilities.append(probability)
            if token in settings.ends or probability < threshold:
                kv.level(length + index - 1)
                self._values, self._spare = self._spare, self._values
                return current.tokens[:, : length + index], probabilities
        self._values, self._spare = self._spare, self._values
        self._unread = [self._values[count - 1]] if threshold else []
        return current.tokens, probabilities

    def begin(self, settings: RoundSettings, tokens: Sequence[Tensor], count: int, *, launched: int) -> bool:
        """Launch the first drafts of the next round, if that is possible, before transformers prepares it.

        tokens: the expected tokens, which are joined: [1, S] in all. count: the expected number of drafts. launched:
        how many of them are launched. Returns whether the round has begun.
        """
        start = sum(part.shape[1] for part in tokens) - _REPEATED
        self._begun = None
        if 0 < start <= self._runner.cache.length:
            self._begun = Begun(tokens, start, count)
            self.go_on(settings, count, launched=launched)
        return self._begun is not None

    def go_on(self, settings: RoundSettings, count: int, *, launched: int) -> None:
        """Launch drafts of the round that `begin` has begun, until there are `launched` of them. See `begin`."""
        kv, begun = self._runner.cache, self._begun
        if begun is None or not begun.usable:
            return
        before: int = kv.length
        start, length = begun.place
        kv.level(start)
        if self._may_launch(settings, begun, count):
            begun.resize(count)
            if begun.drafts:
                kv.level(length + begun.drafts - 1)
            begun.usable = all(self._launch(begun, settings) for _ in range(launched - begun.drafts))
        elif begun.drafts:
            begun.usable = False
        else:
            self._begun = None
        kv.level(before)

    def take(self) -> Begun | None:
        """Return the round that `begin` began; None if there is none, or if it was taken already.

        Keys that its steps have overwritten are removed from the cache.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            self._runner.cache.level(min(begun.place[0], self._runner.cache.length))
        return begun

    def last_probability(self) -> list[float]:
        """Return a list with the probability of the last round's last draft.

        It is empty if the probability was not needed, or if `of` or an earlier call has returned it.
        """
        unread, self._unread = self._unread, []
        return [values.read()[1] for values in unread]

    def on_host(self, count: int) -> list[int]:
        """Return the first `count` drafts of the last round. Waits for them."""
        return [values.read()[0] for values in self._values[:count]]

    def _may_launch(self, settings: RoundSettings, begun: Begun, count: int) -> bool:
        """Whether all drafts of a round that is not complete may be launched. count: their number."""
        start, length = begun.place
        steps = {1: count - begun.drafts}
        if not begun.drafts:
            steps = {length - start: 1, 1: count - 1 + (length - start == 1)}
        exceeds = settings.limit is not None and length + count >= settings.limit
        has_room = self._runner.cache.has_room(length - start + count - 1)
        return not exceeds and has_room and self._runner.may_advance(steps)

    def _launch(self, begun: Begun, settings: RoundSettings) -> bool:
        """Launch the next draft of a round, and copy its values to the host. Returns whether it was launched."""
        (start, length), index, tokens = begun.place, begun.drafts, begun.tokens
        position, count = (length + index - 1, 1) if index else (start, length - start)
        step = self._runner.advance(position, count, Source(tokens, None, position, position + 1))
        if step is None:
            return False
        assert step.draft is not None
        tokens[0, length + index] = step.draft[0]
        if index == len(self._spare):
            self._spare.append(_Values(tokens.device))
        self._spare[index].send(step.draft)
        begun.drafts += 1
        return True


# At the beginning of a round, transformers crops the assistant's cache to all but the last two tokens of the prompt.
_REPEATED = 2


class Begun:
    """A round whose first drafts were launched.

    tokens: the tokens before the round, [1, S], followed by room for the drafts. place: the length of the cache before
    the round, and S. drafts: the number of drafts that were launched. usable: whether the round may go on with them.
    """

    def __init__(self, parts: Sequence[Tensor], start: int, count: int) -> None:
        """parts: the tokens before the round, to be joined. count: the number of drafts."""
        self.tokens = torch.cat((*parts, parts[0].new_empty((1, count))), dim=1)
        self.place = start, self.tokens.shape[1] - count
        self.drafts = 0
        self.usable = True

    def serves(self, start: int, length: int, count: int) -> bool:
        """Whether this is the beginning of a round of up to `count` drafts at this place."""
        return self.usable and self.place == (start, length) and self.drafts <= count

    def resize(self, count: int) -> None:
        """Make room for exactly this many drafts, at least as many as were launched."""
        before, (_, length) = self.tokens, self.place
        if before.shape[1] != length + count:
            room = before.new_empty((1, count - self.drafts))
            self.tokens = torch.cat((before[:, : length + self.drafts], room), dim=1)


class _Values:
    """A draft and its probability, copied to the host.

    The copy is on the stream of the steps. The second stream of a `HostCopy` would save less time on the device than it
    costs on the host.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._pinned = torch.empty(2, dtype=torch.int64, pin_memory=on_gpu)
        self._tokens = self._pinned.numpy()
        self._probabilities = self._pinned.view(torch.float32).numpy()
        self._sent: Any = torch.cuda.Event() if on_gpu else None

    def send(self, draft: Tensor) -> None:
        """Start copying the values. draft: that of a `RecordedStep`."""
        self._pinned.copy_(draft, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(draft.device))

    def read(self) -> tuple[int, float]:
        """Return the token and its probability. Waits for the copy."""
        if self._sent is not None:
            self._sent.synchronize()
        return int(self._tokens[0]), float(self._probabilities[2])
