"""The recorded steps of an assistant model, which drafts tokens for one call of another model.

transformers calls the assistant's `generate` for every draft, with the cache that the previous call returned, and
removes rejected tokens from it in between. All of these calls (rounds) use one `DecodeCache`, which drops tokens by
reducing its length. So nothing is copied between rounds, and the same recordings serve all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hf_rocm import features
from hf_rocm.generation import deferred_stop, loops
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.hybrid import RECURRENT
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.runner import Runner
from hf_rocm.generation.state import SETTINGS, state_of


class Rounds:
    """The rounds of one call.

    model: the assistant. assisted: the model that it drafts for. limit: the largest sequence length that the call can
    reach. translated: whether the two models have different tokenizers. cache: None before the first round, and in a
    call whose rounds run uncaptured.
    """

    def __init__(self, model: Any, assisted: Any, *, limit: int, translated: bool) -> None:
        self.model = model
        self.limit = limit
        self.cache: DecodeCache | None = None
        self._assisted = assisted
        self._translated = translated
        self._runner: Runner | None = None

    def refuses(self, generation_config: Any) -> str | None:
        """Return why the rounds can't be recorded, or None."""
        if self._translated and generation_config.do_sample:
            return "sampling with another tokenizer looks up an embedding, which synchronises the host with the device"
        if any(Agreement(model).group is not None for model in (self.model, self._assisted)):
            return "the assistant, or the model that it drafts for, is sharded over several ranks"
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
        self.cache, self._runner = cache, None

    def decode(self, stock: Callable[..., Any], input_ids: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run transformers' loop for one round."""
        assert self.cache is not None
        with deferred_stop.stopping_on_time(), loops.stepping(self.model, self.cache, self._step):
            return stock(input_ids, *args, **kwargs)

    def _step(self, arguments: Mapping[str, Any]) -> Any:
        if SETTINGS not in self.model.__dict__:
            # The model was restored in the meantime.
            return self.model(**arguments)
        if self._runner is None:
            assert self.cache is not None
            self._runner = Runner(state_of(self.model), self.cache)
        return self._runner(self.model, arguments)


@contextmanager
def drafting(rounds: Rounds | None) -> Iterator[None]:
    """Within the block, use these rounds for this thread's call."""
    before, _thread.rounds = _thread.rounds, rounds
    try:
        yield
    finally:
        _thread.rounds = before


def rounds_of(model: Any, generation_config: Any) -> Rounds | None:
    """Return the rounds to which this call of the model's `generate` belongs, or None."""
    rounds = _thread.rounds
    is_round = rounds is not None and rounds.model is model and getattr(generation_config, "is_assistant", False)
    return rounds if is_round else None


class _Thread(threading.local):
    rounds: Rounds | None = None


_thread = _Thread()
