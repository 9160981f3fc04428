"""Decide when a recorded step is compared with an uncaptured one again: often at first, then at growing intervals.

Replays 1, 2 and 3 of a recording are compared, then 5, 9, 17, …: the interval doubles up to `LONGEST`. Calls of
`generate` follow a similar rule: the first replay of calls 2 and 3 is compared, and after that the first replay of any
call that begins `BETWEEN_CALLS` replays or more after the last comparison.

Cost, in steps: a comparison that agrees at once runs up to `BACK` + 1 uncaptured steps besides the replay. Of N replays
in one call, about 2 + log2(LONGEST) + N / LONGEST are compared, so there are about (BACK + 1) / LONGEST uncaptured
steps per replay. This is 0.2 % of the steps, or 0.9 % of the time where an uncaptured step takes 3.6 times as long as a
replay. The first replay of a call has no steps before it to recompute, so its comparison costs one uncaptured step and
one replay for at least `BETWEEN_CALLS` replays, again 0.9 %.
"""

from __future__ import annotations

# The largest interval between two comparisons, in replays.
LONGEST = 2048
# The largest number of earlier steps that a comparison recomputes.
BACK = 4
# The number of calls whose first replay is always compared.
FIRST_CALLS = 3
# A later call's first replay is compared if this many replays have run since the last comparison.
BETWEEN_CALLS = 512


class Schedule:
    """The comparisons of one recording.

    replays: the number of replays. since: the number of replays since the last comparison that agreed. in_call: how
    many of these belong to the current call. comparisons: the number of comparisons that agreed. calls: the number of
    calls to `generate` that replayed the recording.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.since = 0
        self.in_call = 0
        self.comparisons = 0
        self.calls = 0
        self._distance = 1
        # The last call that replayed the recording.
        self._call: int | None = None
        # Whether the next replay is compared because it is the first of its call.
        self._first_of_call = False

    @property
    def proven(self) -> bool:
        """Whether the first comparison has passed."""
        return self.comparisons > 0

    @property
    def due(self) -> bool:
        """Whether the next replay must be compared."""
        return self._first_of_call or self._interval_elapsed

    def due_in(self, call: int, replays: int = 1) -> bool:
        """Whether one of the next replays must be compared if they belong to the call with this number."""
        first = self._first_of_call if call == self._call else self._compares_first_of(self.calls + 1)
        return first or self.since + replays >= self._distance

    @property
    def _interval_elapsed(self) -> bool:
        return self.since + 1 >= self._distance

    def enter(self, call: int) -> None:
        """Record that the next replay belongs to the call with this number."""
        if call != self._call:
            self._call = call
            self.calls += 1
            self.in_call = 0
            self._first_of_call = self._compares_first_of(self.calls)

    def _compares_first_of(self, calls: int) -> bool:
        """Whether the first replay of the `calls`-th call is compared."""
        return calls <= FIRST_CALLS or self.since >= BETWEEN_CALLS

    def count(self) -> None:
        """Count a replay that was not compared."""
        self.replays += 1
        self.since += 1
        self.in_call += 1

    def agreed(self) -> None:
        """Count a replay that was compared and agreed. The interval grows only if it caused the comparison."""
        was_due = self._interval_elapsed
        self.replays += 1
        self.since = self.in_call = 0
        self.comparisons += 1
        self._first_of_call = False
        if was_due and self.comparisons >= 3:
            self._distance = min(2 * self._distance, LONGEST)
