"""Record and replay the reordering of a cache between two steps of a beam search.

A reordering copies the keys and values of every layer with dozens of small kernels. A recording covers the number of
tokens rounded up, so that it stays valid for many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.cache_layer import reorder
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.recorded_step import Recorded, drop_oldest
from hf_rocm.generation.recorder import Recorder
from hf_rocm.generation.step import Inputs
from hf_rocm.ops.bits import bits

# The largest number of recorded reorderings of one cache, one for every rounded number of tokens.
MOST = 16
# Their key in the dict of recordings.
_ENTRY = "reorderings"


class Reordering(Recorded):
    """The recording of one reordering. Its input is the source row of every row of the batch, [B] int64."""

    def __init__(self, recorder: Recorder, cache: DecodeCache) -> None:
        tensors = cache.rows_of_beams(rounded=True)
        # the identity, so that a run during the recording is harmless
        order = torch.arange(len(tensors[0]), device=tensors[0].device)

        def run(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
            reorder(tensors, buffers[0])
            return []

        super().__init__(recorder, Inputs((order,), ()), run, [])

    def agrees(self, cache: DecodeCache, rows: Tensor) -> Callable[[], bool]:
        """Call before a replay. Returns a function that checks, after the replay, whether keys and values are correct.

        Keys and values are compared by the sums of their bits: one sum for every head and token.
        """
        expected = [sums.index_select(0, rows) for sums in _sums(cache)]
        return lambda: all(map(torch.equal, expected, _sums(cache)))


def recorded(
    cache: DecodeCache, rows: Tensor, recorder: Callable[[torch.device], Recorder], ranks: Agreement
) -> Reordering | str | None:
    """Return the recorded reordering for the cache's number of tokens.

    If there is none, reorder the cache, record the reordering, and return None, or a sentence if the recording fails.
    rows: the source row of every row of the batch, [B] int64.
    """
    reorderings = cache.recordings.setdefault(_ENTRY, {})
    extents = cache.extents()
    step: Reordering | None = reorderings.get(extents)
    if step is not None:
        return step
    reorder(cache.rows_of_beams(), rows)
    # The reordering has just run, so only its recording can fail.
    with suppress(Exception):
        step = Reordering(recorder(rows.device), cache)
    if not ranks.all(step is not None) or step is None:
        return "the reordering of the cache can't be recorded"
    drop_oldest(reorderings, MOST)
    reorderings[extents] = step
    return None


def _sums(cache: DecodeCache) -> list[Tensor]:
    return [bits(tensor).sum(-1, dtype=torch.int64) for tensor in cache.rows_of_beams()]
