"""Prompt lookup without waiting for the device: transformers searches a copy of the tokens in the host's memory.

The stock search waits for the device once for every n-gram length and again for every match. The same search runs here,
so the drafts are the same, but the tokens are copied to the host once per step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_rocm import features, patches
from hf_rocm.patches import Change


@contextmanager
def searching_on_the_host() -> Iterator[None]:
    """Within the block, prompt lookup of this thread searches on the host, except with logits processors.

    A processor may have tensors on the device, and transformers calls it for every drafted token.
    """
    if features.refuses("prompt_lookup") is not None:
        yield
        return
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator as Generator

    before, _thread.searches = _thread.searches, {}
    try:
        with patches.applied(Change(Generator, "get_candidates", _searches, key=__name__)):
            yield
    finally:
        _thread.searches = before


class _Thread(threading.local):
    """searches: maps a generator of this thread's call to its copy for tokens on the host; None outside the block."""

    searches: dict[Any, Any] | None = None


_thread = _Thread()


def _searches(change: Change) -> Callable[..., Any]:
    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        searches = _thread.searches
        stock = change.call_of(self)
        if searches is None or not change.live or getattr(self, "logits_processor", None):
            return stock(input_ids, *args, **kwargs)
        if self not in searches:
            searches[self] = _on_host(self)
        tokens = input_ids.cpu()
        extended, logits = change.call_of(searches[self])(tokens, *args, **kwargs)
        if extended is tokens:
            return input_ids, logits
        drafts = extended[:, tokens.shape[1] :].to(input_ids.device, non_blocking=True)
        return torch.cat((input_ids, drafts), dim=1), logits

    return get_candidates


def _on_host(generator: Any) -> Any:
    """A copy of a generator that has no processors, with its end tokens in the host's memory."""
    result, ends = copy.copy(generator), generator.eos_token_id
    vars(result).update(
        logits_processor=None,  # an empty list changes no logits but is called for every drafted token
        eos_token_id=ends.cpu() if isinstance(ends, Tensor) else ends,
    )
    return result
