"""The keys of steps that have run with a cache, including those of earlier calls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

# The key in a cache's dict of recordings.
_ENTRY = "seen"

# The largest number of keys in each dict. A key belongs to one state of the model, and a model may have any number of
# states, for example if adapters are loaded and deleted.
_MAX_KEYS = 256


class Seen:
    """The steps that have run with one cache.

    Its entry in the cache's dict of recordings is removed when the dict is cleared.
    """

    def __init__(self) -> None:
        self._replayed: dict[tuple[int | None, int], Hashable] = {}
        self._verified: dict[Hashable, bool] = {}

    def record_replay(self, state: int | None, tokens: int, key: Hashable) -> None:
        """Record that a step of this many tokens with resident inputs was replayed.

        state: the number of the model's fingerprint.
        """
        _keep(self._replayed, (state, tokens), key)

    def key_of(self, state: int | None, tokens: int) -> Hashable:
        """The key that `record_replay` last recorded for this state and number of tokens, or None."""
        return self._replayed.get((state, tokens))

    def check_and_record(self, key: Hashable) -> bool:
        """Return whether a step with this key has verified drafts before. Later calls with this key return True."""
        if key in self._verified:
            return True
        _keep(self._verified, key, True)
        return False


def seen_over(cache: Any) -> Seen:
    """The keys of the steps that have run with this `DecodeCache`."""
    seen: Seen | None = cache.recordings.get(_ENTRY)
    if seen is None:
        seen = cache.recordings[_ENTRY] = Seen()
    return seen


def step_over(cache: Any, state: int | None, tokens: int) -> Any:
    """The recording of the last replayed step of this many tokens with resident inputs and this cache, or None.

    state: the number of the model's fingerprint.
    """
    return cache.recordings.get(seen_over(cache).key_of(state, tokens))


def _keep(keys: dict[Any, Any], key: Hashable, value: Hashable) -> None:
    """Set a value, and drop the oldest one if there are too many."""
    keys[key] = value
    if len(keys) > _MAX_KEYS:
        del keys[next(iter(keys))]
