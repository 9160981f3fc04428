"""The recorded steps of an assistant model, which drafts tokens for one call of another model.

transformers calls the assistant's `generate` for every round of drafts, with the cache that the previous call
returned, and removes rejected tokens from it in between. All of these calls (rounds) use one `DecodeCache`, which drops
tokens by reducing its length. So nothing is copied between rounds, and the same recordings serve all of them. Where
`drafting` can draft the tokens of a round, its call to `generate` is skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from hf_rocm import features, patches
from hf_rocm.generation import deferred_stop, loops
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.drafting import Drafts, RoundSettings, may_skip, settings_of
from hf_rocm.generation.host_tokens import HostTokens, accepted_tokens
from hf_rocm.generation.hybrid import RECURRENT
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.runner import Runner
from hf_rocm.generation.state import SETTINGS, state_of
from hf_rocm.generation.token_choice import FindRunner
from hf_rocm.patches import Change


class Rounds:
    """The rounds of one call.

    model: the assistant. assisted: the model that it drafts for. limit: the largest sequence length that the call can
    reach. translated: whether the two models have different tokenizers. observed: whether user code may run
    between two rounds. cache: None before the first round, and in a call whose rounds run uncaptured.
    """

    def __init__(self, model: Any, assisted: Any, *, limit: int, translated: bool, observed: bool) -> None:
        self.model = model
        self.limit = limit
        self.cache: DecodeCache | None = None
        self._assisted = assisted
        self._translated = translated
        self._observed = observed
        self._runner: Runner | None = None
        # The tokens of the call; see `follow`.
        self._known: HostTokens | None = None
        self._lookahead: Lookahead
        # The model's runner.
        self._verifier: FindRunner | None = None
        self._drafts: Drafts | None = None
        # The settings of the last call to `generate`.
        self._settings: RoundSettings | None = None
        # The last round, if it did not call `generate`.
        self._last: _Last | None = None
        # The tokens that the model accepted, if the next round has begun.
        self._accepted: list[int] = []
        # The number of rounds in a row whose drafts were all accepted.
        self._in_a_row = 0
        # Whether the next round has begun as if all drafts of this one were accepted too.
        self._guessed = False

    def refuses(self, generation_config: Any) -> str | None:
        """Return why the rounds can't be recorded, or None."""
        if self._translated and generation_config.do_sample:
            return "sampling with another tokenizer looks up an embedding, which synchronises the host with the device"
        if any(Agreement(model).group is not None for model in (self.model, self._assisted)):
            return "the assistant, or the model that it drafts for, is sharded across several ranks"
        return features.refuses("assistants")

    def refuses_windows(self, windows: Sequence[int | None]) -> str | None:
        """Return why the rounds can't use a cache with these windows, or None."""
        if RECURRENT in windows:
            return "rejected tokens can't be removed from the assistant's recurrent states"
        if self._translated and any(windows):
            return "with another tokenizer, any number of tokens may be removed from the assistant's sliding windows"
        return None

    def begin(self, cache: DecodeCache, tokens: int) -> None:
        """Use this empty cache for all rounds. tokens: the number of new tokens of the first round."""
        # The second round may compute the prompt's last token again.
        cache.drafts = 1
        cache.ahead = tokens
        self.cache, self._runner, self._drafts = cache, None, None

    def follow(self, known: HostTokens, lookahead: Lookahead) -> bool:
        """Let rounds skip `generate`, unless user code may run between rounds or the models are on different devices.

        Call this only if the loop uses the drafts solely to compare them with the tokens that it selects.
        known: the tokens of the call. lookahead: that of the call. Returns whether `verified` must be called after
        every step of this loop.
        """
        if self._observed or self.model.device != self._assisted.device:
            return False
        self._known, self._lookahead = known, lookahead
        return True

    def decode(self, stock: Callable[..., Any], input_ids: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run transformers' loop for one round."""
        assert self.cache is not None
        self._settings = None
        if self._known is not None and not args:
            self._settings = settings_of(self.model, kwargs, length=input_ids.shape[1])
        with deferred_stop.stopping_on_time(), loops.stepping(self.model, self.cache, self._step):
            return stock(input_ids, *args, **kwargs)

    def draft(self, generator: Any, arguments: Mapping[str, Any]) -> Tensor | None:
        """Draft the tokens of a round without a call to `generate`.

        generator: an `AssistedCandidateGenerator` of the call. arguments: the argument of its `_generate_candidates`.
        Returns the tokens so far, followed by the drafts, [1, S]; None if the round has to call `generate`.
        """
        accepted, self._accepted, self._guessed = self._accepted, [], False
        if self._drafts is None:
            return None
        begun = self._drafts.take()
        if self._settings is None or self._known is None or not self._may_skip():
            return None
        threshold = arguments["generation_config"].assistant_confidence_threshold or 0.0
        if generator.assistant_kwargs.get("past_key_values") is not self.cache or threshold < 0:
            return None
        input_ids, count = arguments[generator.input_ids_key], arguments["max_new_tokens"]
        tokens = self._known.of(input_ids)
        padding = None if generator.assistant_kwargs.get("attention_mask") is not None else self._settings.padding
        if padding is not None and padding in tokens:
            return None
        if begun is not None and tokens[-len(accepted) :].tolist() != accepted:
            begun = None
        drafted = self._drafts.of(self._settings, input_ids, count, threshold=threshold, begun=begun)
        if drafted is None:
            return None
        if hasattr(generator, "probs"):
            generator.probs.extend(drafted[1])
        self._last = _Last(drafted[0], input_ids.shape[1], count)
        self._verify(self._last)
        return drafted[0]

    def _verify(self, last: _Last) -> None:
        """Launch the step that verifies these drafts and, if that is likely to save time, a draft of the next round."""
        verifier = None if self._verifier is None else self._verifier()
        if verifier is None:
            return
        step = self._lookahead.launch_candidates(last.tokens, last.length - 1, verifier)
        following = self._following(last, last.tokens.shape[1] + 1, every=True)
        if step is None or self._in_a_row < _LIKELY or not following:
            return
        assert self._drafts is not None and self._settings is not None and step.tokens is not None
        # The draft is computed while the host reads the step's tokens, and is dropped unless all drafts are accepted.
        tokens = last.tokens, step.tokens[:, -1:]
        self._guessed = self._drafts.begin(self._settings, tokens, following, launched=1)

    def _following(self, last: _Last, length: int, *, every: bool) -> int:
        """The expected number of drafts of the next round; 0 if there is none.

        length: the length of the sequence then. every: whether the model accepts every draft of the last round.
        """
        if length + 1 >= self.limit:
            return 0
        # After a round, transformers raises the limit if it was reached and every draft was accepted; otherwise, it
        # lowers the limit by at most one. A round with fewer drafts than its limit is probably followed by one of the
        # same length.
        most = last.limit if every else last.limit - 1
        return max(1, min(last.tokens.shape[1] - last.length, most, self.limit - length - 1))

    def finish(self, generator: Any) -> None:
        """Append the probability of the last draft to those of the generator, which reads them after every round."""
        probabilities = [] if self._drafts is None else self._drafts.last_probability()
        if hasattr(generator, "probs"):
            generator.probs.extend(probabilities)

    def verified(self, selected: Tensor, on_host: Tensor, verifier: FindRunner, *, launched: bool) -> None:
        """Begin the next round as soon as the drafts of the last one are verified.

        selected: the tokens with the largest logits of the verifying step, [1, N]; on_host: the same on the host.
        verifier: a weak reference to the runner of that step. launched: whether `_verify` has launched this replay.
        """
        self._verifier = verifier
        # Only this replay has chosen the token that a guessed round has read.
        guessed, self._guessed = self._guessed and launched, False
        in_a_row, self._in_a_row = self._in_a_row, 0
        last, self._last = self._last, None
        before = None if self._known is None else self._known.on_device
        if last is None or before is None or before.shape[1] != last.length or not self._may_skip():
            return
        assert self._known is not None and self._settings is not None and self._drafts is not None
        drafts, chosen = self._drafts.on_host(last.tokens.shape[1] - last.length), on_host[0].tolist()
        if len(chosen) != len(drafts) + 1:
            return
        self._known.draft(drafts, last.tokens)
        accepted = accepted_tokens(drafts, chosen)
        every = len(accepted) == len(chosen)
        following = self._following(last, last.length + len(accepted), every=every)
        if not following or not self._settings.ends.isdisjoint(accepted):
            return
        self._accepted, self._in_a_row = accepted, in_a_row + 1 if every else 0
        if guessed and every:
            self._drafts.go_on(self._settings, following, launched=following)
            return
        tokens = before, selected[:, : len(accepted)]
        self._drafts.begin(self._settings, tokens, following, launched=following)

    def _may_skip(self) -> bool:
        return SETTINGS in self.model.__dict__ and may_skip(self.model)

    def _step(self, arguments: Mapping[str, Any]) -> Any:
        if SETTINGS not in self.model.__dict__:
            # The model was restored in the meantime.
            return self.model(**arguments)
        if self._runner is None:
            assert self.cache is not None
            self._runner = Runner(state_of(self.model), self.cache, probable=True)
            self._drafts = Drafts(self._runner)
        return self._runner(self.model, arguments)


# After this number of rounds in a row whose drafts were all accepted, the probability that a draft of the next round is
# rejected is about 1 in 5. A correct guess saves the time in which the host reads the tokens of a step and launches the
# next one, and a wrong guess costs a step of the assistant, most of which is computed in this time.
_LIKELY = 3


class _Last(NamedTuple):
    """A round without `generate`.

    tokens: all tokens and the drafts, [1, S + N]. length: S. limit: the largest number of drafts.
    """

    tokens: Tensor
    length: int
    limit: int


@contextmanager
def drafting(rounds: Rounds | None) -> Iterator[None]:
    """Within the block, use these rounds for this thread's call."""
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    replacements = (
        {} if rounds is None else {"_generate_candidates": _candidates, "update_candidate_strategy": _updates}
    )
    changes = [Change(AssistedCandidateGenerator, name, make, key=__name__) for name, make in replacements.items()]
    before, _thread.rounds = _thread.rounds, rounds
    try:
        with patches.applied(*changes):
            yield
    finally:
        _thread.rounds = before


def _candidates(change: Change) -> Callable[..., Any]:
    def _generate_candidates(self: Any, generation_args: Any) -> Any:
        rounds = _rounds_with(self, change)
        drafted = None if rounds is None else rounds.draft(self, generation_args)
        # The loop does not read the logits of the drafts; see `Rounds.follow`.
        return change.call_of(self)(generation_args) if drafted is None else (drafted, None)

    return _generate_candidates


def _updates(change: Change) -> Callable[..., Any]:
    def update_candidate_strategy(self: Any, *args: Any, **kwargs: Any) -> Any:
        rounds = _rounds_with(self, change)
        if rounds is not None:
            rounds.finish(self)
        return change.call_of(self)(*args, **kwargs)

    return update_candidate_strategy


def _rounds_with(generator: Any, change: Change) -> Rounds | None:
    """Return the rounds in which this candidate generator may skip `generate`, or None. change: that of its class."""
    rounds = _thread.rounds if change.live and type(generator) is change.owner else None
    return rounds if rounds is not None and rounds.model is generator.assistant_model else None


def rounds_of(model: Any, generation_config: Any) -> Rounds | None:
    """Return the rounds to which this call of the model's `generate` belongs, or None."""
    rounds = _thread.rounds
    is_round = rounds is not None and rounds.model is model and getattr(generation_config, "is_assistant", False)
    return rounds if is_round else None


class _Thread(threading.local):
    rounds: Rounds | None = None


_thread = _Thread()
