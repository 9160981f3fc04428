"""Launch the next step of prompt lookup as soon as the tokens of the last step are on the host.

After a step, transformers' loop accepts tokens, looks up drafts, and prepares the next step, while the device waits.
The accepted tokens and the drafts follow from the step's tokens. So the next step is launched before the loop
continues, and the loop runs while the device computes. When the loop has prepared the step, its position and tokens are
compared with those of the launched one. If they differ, or if the step must run in another way, it is launched again:
a step writes only to its outputs and to the cache rows of its own tokens, so the first launch has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.host_tokens import HostTokens

if TYPE_CHECKING:
    from hf_rocm.generation.lookup import Search
    from hf_rocm.generation.recorded_step import RecordedStep

Launch = Callable[[int, "np.ndarray[Any, Any]"], "tuple[RecordedStep, Tensor] | None"]


class Launched(NamedTuple):
    """A step that was launched before transformers' loop has prepared it.

    position: the number of tokens before the step. ids: its tokens, [N] on the host; input_ids: the same tokens on the
    device, [1, N]. logits: a copy of the previous step's logits, [1, N, V]. known: the tokens of the call.
    """

    step: RecordedStep
    position: int
    ids: np.ndarray[Any, Any]
    input_ids: Tensor
    logits: Tensor
    known: HostTokens

    def serves(self, position: int, input_ids: Tensor) -> bool:
        """Whether this is the step at this position. input_ids: [1, S], all tokens so far, including drafts."""
        ids = self.known.step_of(input_ids)
        return position == self.position and ids is not None and np.array_equal(ids, self.ids)


def refuses(arguments: Mapping[str, Any]) -> str | None:
    """Return why the next step of a call of `_assisted_decoding` must not be launched early, or None.

    arguments: the keyword arguments of `_assisted_decoding`.
    """
    if arguments["generation_config"].prompt_lookup_num_tokens is None:
        return "an assistant drafts"
    if type(arguments.get("past_key_values")) is not DecodeCache:
        return "the cache has states that a step updates in place"
    pieces = [*arguments["stopping_criteria"], *filter(None, [arguments.get("streamer")])]
    if any(type(piece).__module__.split(".")[0] != "transformers" for piece in pieces):
        return "user code runs between two steps, and may change what the next step reads"
    return None


class Lookahead:
    """The next step of a call. tokens: the tokens of the call. cache: its cache; None if no step is launched early."""

    def __init__(self, tokens: HostTokens | None = None, cache: DecodeCache | None = None) -> None:
        self._tokens = tokens or HostTokens()
        self._cache = cache
        self._search: Search | None = None  # the last search of the loop
        self._accepted: list[int] = []  # the tokens that are expected to be appended before the launched step

    @property
    def launched(self) -> Launched | None:
        """The step that was launched early and that the loop has not called yet."""
        launched: Launched | None = None if self._cache is None else self._cache.launched
        return launched

    @property
    def active(self) -> bool:
        """Whether `launch` may launch a step."""
        return self._cache is not None and self._search is not None

    def candidates(self, input_ids: Tensor, search: Search) -> Tensor:
        """Return the tokens [1, S] followed by the drafts that a search returns; the same tensor without drafts."""
        known, tokens = self._tokens.knows(input_ids), self._tokens.of(input_ids)
        launched = self.launched
        if launched is None or not (known and search == self._search and self._expected(tokens, launched)):
            launched = None
        self._search = search
        drafts = search.drafts(tokens) if launched is None else launched.ids[1:]
        if not len(drafts):
            return input_ids
        if launched is None or launched.input_ids.device != input_ids.device:
            on_device = torch.from_numpy(drafts)[None].to(input_ids.device, input_ids.dtype)
        else:
            on_device = launched.input_ids[:, 1:]  # copying them from the host would wait for the launched step
        candidates = torch.cat((input_ids, on_device), dim=1)
        self._tokens.draft(drafts, candidates)
        return candidates

    def launch(self, selected: Tensor, logits: Tensor, launch: Launch) -> None:
        """Launch the step that is expected to follow.

        selected: the tokens with the largest logits of the last step, [1, N] on the host. logits: a copy of these
        logits, [1, N, V]. launch: called with the position and the tokens of the step; returns the recorded step and
        the tokens on the device, or None if nothing was launched.
        """
        cache, search = self._cache, self._search
        chosen: list[int] = selected[0].tolist()
        drafts = self._tokens.drafts(len(chosen) - 1)
        if cache is None or search is None or drafts is None:
            return
        count = next((index for index, draft in enumerate(drafts) if draft != chosen[index]), len(drafts))
        self._accepted = chosen[: count + 1]
        tokens = self._tokens.followed_by(self._accepted)
        if len(tokens) >= search.limit or not search.ends.isdisjoint(self._accepted):
            return  # the loop ends here
        ids = np.concatenate((tokens[-1:], search.drafts(tokens)))
        position = len(tokens) - 1
        result = launch(position, ids)
        if result is not None:
            step, input_ids = result
            cache.launched = Launched(step, position, ids, input_ids, logits, self._tokens)

    def _expected(self, tokens: np.ndarray[Any, Any], launched: Launched) -> bool:
        accepted = self._accepted
        return len(tokens) == launched.position + 1 and tokens[-len(accepted) :].tolist() == accepted
