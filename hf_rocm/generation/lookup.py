"""Prompt lookup on the host: tokens are copied from the device only if they are not on the host yet.

The stock search waits for the device once for every n-gram length and again for every match. The search here returns
the same drafts, or none while drafts are rejected in greedy decoding (see `draft_search`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_rocm import features, patches
from hf_rocm.generation.draft_search import Search
from hf_rocm.generation.host_tokens import HostTokens
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.patches import Change


@contextmanager
def searching_on_the_host(lookahead: Lookahead | None = None) -> Iterator[None]:
    """Within the block, prompt lookup of this thread searches on the host.

    Generators with logits processors, subclasses of the generator and batches of several rows use the stock search, as
    do all generators if their code is not supported or was replaced. A processor may have tensors on the device, and
    transformers calls it for every drafted token. lookahead: that of the call; None: the tokens are copied for every
    search.
    """
    if features.refuses("prompt_lookup") is not None:
        yield
        return
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator as Generator

    before = _thread.ends, _thread.lookahead
    _thread.ends, _thread.lookahead = {}, lookahead
    try:
        with patches.applied(Change(Generator, "get_candidates", _searches, key=__name__)):
            yield
    finally:
        _thread.ends, _thread.lookahead = before


class _Thread(threading.local):
    """ends: maps a generator of this thread's call to its EOS tokens; None outside `searching_on_the_host`."""

    ends: dict[Any, frozenset[int]] | None = None
    lookahead: Lookahead | None = None


_thread = _Thread()


def _searches(change: Change) -> Callable[..., Any]:
    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ends = _thread.ends
        subclass = type(self) is not change.owner
        if ends is None or not change.live or subclass or getattr(self, "logits_processor", None) or len(input_ids) > 1:
            return change.call_of(self)(input_ids, *args, **kwargs)
        if self not in ends:
            ends[self] = frozenset(() if self.eos_token_id is None else self.eos_token_id.cpu().tolist())
        search = Search(self.num_output_tokens, self.max_matching_ngram_size, self.max_length, ends[self])
        return (_thread.lookahead or Lookahead(HostTokens())).candidates(input_ids, search), None

    return get_candidates
