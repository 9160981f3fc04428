"""Launch the next verifying step before transformers' loop has prepared it.

After a step of prompt lookup, transformers' loop accepts tokens, looks up drafts, and prepares the next step, while the
device waits. The accepted tokens and the drafts follow from the step's tokens. So the next step is launched before the
loop continues, and the loop runs while the device computes. When the loop has prepared the step, its position and
tokens are compared with those of the launched one. If they differ, or if the step must run in another way, the prepared
step runs as usual: a step writes only to its outputs and to the cache rows of its own tokens, so the launch has no
effect.

After enough steps in a row with the same number of drafts, the next one is queued even before the tokens of the last
step are on the host: the accepted tokens and the drafts are determined on the device (`ops.look_up_drafts`). If the
number of drafts then differs, the queued step is not used.

The step that verifies the drafts of an assistant is launched right after the last draft, before the host reads that
draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hf_rocm.errors import GraphError
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.draft_search import DraftSearch, Search
from hf_rocm.generation.host_tokens import HostTokens, Unchanged, accepted_tokens
from hf_rocm.generation.inputs import confirm
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.residents import Source
from hf_rocm.generation.streams import HostCopies, HostCopy
from hf_rocm.generation.token_choice import CallRunner
from hf_rocm.ops.look_up_drafts import look_up_drafts, one_kernel


@dataclass
class Launched:
    """A step that was launched before transformers' loop prepared it.

    position: the number of tokens before the step. ids: the N tokens of the step; input_ids: the same tokens on the
    device, [1, N]. accepted: the last step's tokens that the loop is expected to append. candidates: the tensor with
    all tokens and drafts from which the device copied input_ids; if it is not None, ids and accepted are empty. copy:
    the host's copy of the tokens with the largest logits, or None. served: whether the loop has prepared this step.
    """

    step: RecordedStep
    input_ids: Tensor
    position: int
    ids: list[int]
    accepted: list[int]
    candidates: Unchanged | None = None
    copy: HostCopy | None = None
    served: bool = False

    def reads(self, ids: list[int] | None, input_ids: Tensor) -> bool:
        """Whether the step reads these tokens. ids: the last ones of input_ids, [1, S], or None if unknown."""
        return ids == self.ids if self.candidates is None else self.candidates.matches(input_ids)


def refuses(arguments: Mapping[str, Any], observer: str | None) -> str | None:
    """Return why the next step of a call to `_assisted_decoding` must not be launched early, or None.

    arguments: the keyword arguments of `_assisted_decoding`. observer: the name of a user's class whose code runs
    between two steps, or None.
    """
    if arguments["generation_config"].prompt_lookup_num_tokens is None:
        return "an assistant drafts the tokens"
    if type(arguments.get("past_key_values")) is not DecodeCache:
        return "the model is an encoder-decoder model, or has recurrent states"
    return None if observer is None else f"{observer} may change what the next step reads"


class Lookahead:
    """The next step of one call. tokens: the tokens of the call. early: whether the step may be launched early.

    adaptive: whether steps verify drafts only while drafts are accepted, see `draft_search`.

    launched: the step that was launched and that the loop has not called yet. logits: a copy of the last step's logits,
    [1, N, V], if a later replay overwrites them.
    """

    def __init__(self, tokens: HostTokens, *, early: bool = False, adaptive: bool = False) -> None:
        self._tokens = tokens
        self._early = early
        self._drafts = DraftSearch(adaptive=adaptive)
        # The last search of the loop.
        self._search: Search | None = None
        # The tokens of the step that the loop has prepared.
        self._prepared: list[int] | None = None
        # The tokens of the step that the loop has called last.
        self._ids: list[int] | None = None
        self.launched: Launched | None = None
        # The step that the loop has called last, if it was launched early.
        self._called: Launched | None = None
        self.logits: Tensor | None = None
        # The number of tokens of the last step, and how many steps right before it had as many.
        self._alike = 0, 0
        # the time of the last arrival of tokens on the host, and the time between the last two arrivals, in s
        self._arrived = self._interval = 0.0
        # The time from the arrival of tokens to the launch of the next step, in s.
        self._gap = 0.0
        self._header: Tensor | None = None
        # A step whose tokens are not on the host yet.
        self._queued: tuple[RecordedStep, Tensor] | None = None
        # Copies of the tokens that queued steps have read, or that launched ones select.
        self._copies = HostCopies()
        # The tokens of a queued step: expected, read.
        self._unchecked: tuple[list[int], HostCopy] | None = None

    def candidates(self, input_ids: Tensor, search: Search) -> Tensor:
        """Return input_ids, [1, S], followed by the drafts of this search; input_ids itself if there are no drafts."""
        launched = self.launched if search == self._search and self._tokens.has(input_ids) else None
        self._search = search
        tokens = self._tokens.of(input_ids)
        if launched is not None:
            accepted = launched.accepted
            if len(tokens) != launched.position + 1 or tokens[-len(accepted) :].tolist() != accepted:
                launched = None
        drafts: list[int] = (
            launched.ids[1:] if launched is not None else tokens[self._drafts.of(tokens, search)].tolist()
        )
        if not drafts:
            return input_ids
        if launched is None or launched.input_ids.device != input_ids.device:
            on_device = torch.tensor([drafts]).to(input_ids.device, input_ids.dtype)
        else:
            # Copying the drafts from the host would wait for the launched step.
            on_device = launched.input_ids[:, 1:]
        candidates = torch.cat((input_ids, on_device), dim=1)
        self._tokens.draft(drafts, candidates)
        return candidates

    def prepares(self, position: int, input_ids: Tensor) -> bool:
        """Compare a step that the loop prepares with the launched one. Returns whether they are the same step.

        position: the number of tokens before the step. input_ids: [1, S], all tokens so far, including drafts.
        """
        self._prepared = self._tokens.step_of(input_ids)
        launched = self.launched
        if launched is None:
            return False
        launched.served = position == launched.position and launched.reads(self._prepared, input_ids)
        return launched.served

    def take(self, length: int) -> RecordedStep | None:
        """Remove the launched step when the loop calls a step, and return it if the loop has prepared it.

        length: the length of the cache. Raises `GraphError` if the step began before this length.
        """
        # `_prepared` is None if transformers has prepared the step.
        self._ids, self._prepared = self._prepared, None
        launched, self.launched, self._called, self.logits = self.launched, None, None, None
        if launched is None:
            return None
        if launched.position < length:
            raise GraphError("a step that was launched early has overwritten keys of earlier tokens")
        if not launched.served:
            return None
        self._called = launched
        return launched.step

    def on_host(self, step: RecordedStep) -> tuple[Tensor, bool]:
        """Return the tokens with the largest logits of the step that the loop has called last, on the host.

        The second value is True if `launch_candidates` has launched this replay of the step.
        """
        assert step.tokens is not None
        called = self._called
        if called is None or called.step is not step or called.copy is None:
            return step.tokens.cpu(), False
        return called.copy.read().clone(), True

    def end(self, length: int) -> None:
        """Called when the loop has ended. length: the length of the cache. Raises the errors of `take` and `launch`."""
        # If a launched step is left, the loop has not called it.
        used = self.launched is None
        self.take(length)
        if used:
            self._check_queued()

    def expects(self) -> bool:
        """Whether the tokens of the last step determine the next one, so that it can be launched."""
        return self._early and self._ids is not None and self._search is not None

    def queue(self, selected: Tensor, step_ids: Tensor, logits: Tensor, runner: CallRunner) -> None:
        """Queue the next step before the tokens of the last one are on the host, if that probably saves time.

        selected: the tokens with the largest logits of the last step, [1, N] on the device; step_ids: the tokens of
        that step, [1, N]. logits: a copy of its logits, [1, N, V]. The queued step has N tokens too; if the number of
        drafts on the host differs, `launch` ignores the queued step.
        """
        before, search, count = self._tokens.on_device, self._search, selected.shape[1]
        last, times = self._alike
        self._alike = count, times + 1 if count == last else 0
        if before is None or search is None or not self._saves_time(self._alike[1]):
            return
        # the last position if the device accepts all drafts; a model may have no embedding for a later one
        if before.shape[1] + max(1, 2 * count - 2) >= search.limit:
            return
        if count == 1:
            # Without drafts, the position is known.
            position = before.shape[1]
            self._queued = runner.launch(position, 1, Source(before, selected, position, 0))
        elif self._look_up(before, step_ids, selected, search.ngram):
            self._queued = runner.launch(None, count, Source(before, selected, 0, 0, self._header))
        self.logits = None if self._queued is None else logits

    def _look_up(self, before: Tensor, step_ids: Tensor, selected: Tensor, ngram: int) -> bool:
        """Queue `look_up_drafts`, which writes to `_header`. Returns False if that would wait for the device."""
        if self._header is None:
            self._header = torch.zeros(2, dtype=torch.int64, device=before.device)
        operands = before, step_ids, selected, self._header
        if before.is_cuda and not one_kernel(*operands, ngram=ngram):
            return False
        look_up_drafts(*operands, ngram=ngram)
        return True

    def _saves_time(self, times: int) -> bool:
        """Whether to queue a step after `times` + 1 steps in a row with the same number of tokens.

        A queued step that is used saves the gap before it, and one that is not used costs a whole step. After this
        number of steps, the probability that the next one differs is about 1 / (times + 2).
        """
        return (times + 1) * self._gap > self._interval

    def launch(self, selected: Tensor, tokens: Tensor, logits: Tensor, runner: CallRunner) -> None:
        """Launch the next step, unless it is queued already.

        selected: the tokens with the largest logits of the last step, [1, N] on the host; tokens: the same tokens on
        the device. logits: a copy of these logits, [1, N, V]. runner: the call's runner. Raises `GraphError` if the
        tokens that a queued step has read differ from those on the host.
        """
        now = perf_counter()
        self._arrived, self._interval = now, now - self._arrived
        queued, self._queued = self._queued, None
        self._check_queued()
        accepted = self._accepted(selected[0].tolist())
        following = None if accepted is None else self._next(accepted, tokens)
        if accepted is None or following is None:
            return
        position, ids, source = following
        if queued is not None and queued[1].shape[1] == len(ids):
            confirm(runner.cache, position, len(ids))
            if len(ids) > 1:
                # a clone, because the next step that is queued writes to the tensor
                self._unchecked = ids, self._copies.send(queued[1].clone())
        else:
            queued = runner.launch(position, len(ids), source)
            self._gap = perf_counter() - now
        if queued is not None:
            self.launched = Launched(*queued, position, ids, accepted)
            self.logits = logits

    def launch_candidates(self, candidates: Tensor, position: int, runner: CallRunner) -> RecordedStep | None:
        """Launch the step that verifies the drafts of an assistant, if that is possible.

        candidates: [1, S], all tokens and drafts, on the device. position: the number of tokens before the step.
        Returns the step, or None if it was not launched.
        """
        if not runner.can_launch or type(runner.cache) is not DecodeCache:
            return None
        tokens = candidates.shape[1] - position
        launched = runner.launch(position, tokens, Source(candidates, None, position, position + 1))
        if launched is None:
            return None
        step, input_ids = launched
        if step.tokens is None:
            return None
        # The host does not wait for kernels that are launched after the step. The copy is not read if the loop does not
        # use the step.
        copy = self._copies.send(step.tokens)
        self.launched = Launched(step, input_ids, position, [], [], Unchanged(candidates), copy)
        return step

    def _check_queued(self) -> None:
        """Compare the tokens that the last queued step has read with those on the host, unless they were compared."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None and unchecked[1].read()[0].tolist() != unchecked[0]:
            raise GraphError("a step that was queued early has read tokens other than those of the sequence")

    def _accepted(self, chosen: list[int]) -> list[int] | None:
        """The tokens that the loop will append after a step that chose these.

        Returns None if they contain an EOS token, or if the tokens of the step are not known.
        """
        ids, self._ids, search = self._ids, None, self._search
        if ids is None or search is None or len(ids) != len(chosen):
            return None
        accepted = accepted_tokens(ids[1:], chosen)
        return accepted if search.ends.isdisjoint(accepted) else None

    def _next(self, accepted: list[int], selected: Tensor) -> tuple[int, list[int], Source] | None:
        """The position and the tokens of the step after these accepted tokens, on the host and on the device.

        Returns None if the maximum length is reached, or if the earlier tokens are not known. selected: a tensor on the
        device that begins with the accepted tokens, [1, N].
        """
        assert self._search is not None
        tokens, before = self._tokens.followed_by(accepted), self._tokens.on_device
        if before is None or len(tokens) >= self._search.limit:
            return None
        position, drafts = len(tokens) - 1, self._drafts.of(tokens, self._search)
        return position, [accepted[-1], *tokens[drafts].tolist()], Source(before, selected, position, drafts.start)
