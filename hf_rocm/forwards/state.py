"""The recorded forwards of a model: a bounded set, with counts and the reasons why calls ran uncaptured."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import options
from hf_rocm.budget import in_bytes
from hf_rocm.device import total_memory
from hf_rocm.errors import GraphError
from hf_rocm.forwards.host_reads import Program, Read
from hf_rocm.forwards.padding import Padding
from hf_rocm.forwards.recorded import Arena, RecordedForward
from hf_rocm.forwards.snapshot import Snapshot
from hf_rocm.generation import recorder as recorders
from hf_rocm.generation.recorder import Recorder
from hf_rocm.generation.states import FORWARDS, States

# In the model's __dict__: the settings of a prepared model, as builtin types, so that copies and pickles keep them.
SETTINGS = "_hf_rocm_forwards"

# Limits on the numbers of recordings, of shapes that are stored as seen, and of states of the model. After `_FAILURES`
# consecutive shapes that can't be recorded, hf_rocm stops recording the model.
MOST = 64
_SEEN = 512
_SNAPSHOTS = 4
_FAILURES = 4

# After more than this many consecutive new states of the model without a replay, hf_rocm stops recording it.
_UNSETTLED = 32

_log = logging.getLogger("hf_rocm")

Path = tuple[Hashable, ...]


class Branch:
    """A value that the forward reads on the host, and the program that computes it.

    branches: a value → the branch for the next value that the forward reads, or the recording if it reads no other.
    latest, repeated: used only for the first value. latest: the recording of the last call, or None. repeated: whether
    the last two calls used the same recording, and all values are booleans.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.branches: dict[Hashable, Branch | RecordedForward] = {}
        self.latest: RecordedForward | None = None
        self.repeated = False


class State:
    """The state of one model, shared by the threads that call it. `lock` guards its snapshots and recordings."""

    def __init__(self, model: Any) -> None:
        self.name = type(model).__name__
        self.required: bool = model.__dict__[SETTINGS]["required"]
        # The device of the current snapshot.
        self.device: torch.device = model.device
        self.lock = threading.RLock()
        # Why recording has stopped.
        self.disabled: str | None = None
        self.recorded = 0
        # The number of replays, except those before a recording passed its first comparison.
        self.replayed = 0
        # The number of these replays that were compared.
        self.compared = 0
        # Reason → the number of calls that ran uncaptured.
        self.turned_away: Counter[str] = Counter()
        # Length → the number of calls that were padded to it.
        self.padded: Counter[int] = Counter()
        # Why padding has stopped.
        self.unpadded: str | None = None
        # Length → the number of kinds of calls that take longer if padded to it. None: those that are not padded, and
        # take longer if replayed.
        self.slower: Counter[int | None] = Counter()
        # At most `_SNAPSHOTS` snapshots, all with the same weights; the last one is the current one.
        self.snapshots: list[Snapshot] = []
        # snapshot's number → why nothing is recorded in this state.
        self.refused: dict[Hashable, str] = {}
        self._roots: dict[Hashable, Branch | RecordedForward] = {}
        self._recordings: OrderedDict[tuple[Hashable, Path], tuple[RecordedForward, int]] = OrderedDict()
        self._seen: OrderedDict[tuple[Hashable, Path], str | None] = OrderedDict()
        # key of padded calls → the length of the first call.
        self._lengths: OrderedDict[Hashable, int] = OrderedDict()
        # snapshot's number → why calls are not padded, or None.
        self._paddable: dict[int, str | None] = {}
        self._options: dict[int, Any] = {}
        self._numbers = count()
        # The number of new states of the model since the last replay.
        self.unsettled = 0
        self._failures = 0
        self._recorder: Recorder | None = None
        self.arena = Arena()

    def turn_away(self, reason: str) -> None:
        """Count a call that runs uncaptured."""
        self.turned_away[reason] += 1

    def disable(self, reason: str) -> None:
        """Stop recording forwards of this model. Raises `GraphError` if graphs are required."""
        self.disabled = reason
        self.clear()
        _log.warning("%s: forwards run uncaptured from now on: %s", self.name, reason)
        if self.required:
            raise refusal(self.name, reason)

    def stop_padding(self, reason: str) -> None:
        """Stop padding calls of this model."""
        self.unpadded = reason
        self.clear()
        _log.warning("%s: calls are not padded from now on: %s", self.name, reason)

    def drop_slower(self, key: Hashable, path: Path, length: int | None) -> None:
        """Free a recording whose replay takes longer than the forward. length: that of the padded calls, or None."""
        self.slower[length] += 1
        self._drop((key, path))
        what = "a replay" if length is None else f"padding to {length} tokens"
        self._seen[key, path if key in self._roots else ()] = f"{what} takes longer than the uncaptured forward"

    def refuses_padding(self, model: Any, snapshot: Snapshot, pads: Padding) -> str | None:
        """Return why the calls of this model are not padded in this state, or None."""
        if snapshot.number not in self._paddable:
            self._paddable[snapshot.number] = pads.refuses_model(model)
        return self.unpadded or self._paddable[snapshot.number]

    def lengths_differ(self, key: Hashable, length: int) -> bool:
        """Return whether the first call with the same padded form had a different length. Stores the first length."""
        first = self._lengths.setdefault(key, length)
        while len(self._lengths) > _SEEN:
            self._lengths.popitem(last=False)
        return first != length

    def failed(self, key: Hashable, path: Path, reason: str) -> None:
        """Store why a shape can't be recorded. After several consecutive failures, stop recording the model."""
        self._seen[key, path] = reason
        self._failures += 1
        if self._failures >= _FAILURES:
            self.disabled = reason
            self.clear()

    def recorder(self) -> Recorder:
        if self._recorder is None:
            self._recorder = recorders.factories[self.device.type](self.device)
        return self._recorder

    def new_snapshot(self, model: Any) -> Snapshot:
        """Take a snapshot of the model and make it the current one.

        Drop the recordings for other weights, and those of all but the last `_SNAPSHOTS` states.
        """
        snapshot = Snapshot(model, next(self._numbers))
        if model.device != self.device:
            self.device, self._recorder = model.device, None
        same = [other for other in self.snapshots if other.same_weights(snapshot)]
        self._keep([*same[1 - _SNAPSHOTS :], snapshot])
        self.unsettled += 1
        if self.unsettled > _UNSETTLED:
            self.disabled = "the model changes on every call"
            self.clear()
        return snapshot

    def switch(self, model: Any) -> Snapshot | None:
        """If the model is in an earlier snapshot's state again, make that snapshot current and return it; else None."""
        for snapshot in self.snapshots[-2::-1]:
            if snapshot.in_place() and snapshot.unchanged(model):
                self.snapshots.remove(snapshot)
                self.snapshots.append(snapshot)
                return snapshot
        return None

    def find(self, key: Hashable, inputs: Sequence[Tensor]) -> tuple[RecordedForward | None, Path]:
        """Return the recording for these inputs, or None, and the values that the forward reads on the host."""
        root = node = self._roots.get(key)
        path: Path = ()
        boolean = True
        while isinstance(node, Branch):
            value = node.program(inputs)
            boolean = boolean and value[0] is bool
            path += (value,)
            node = node.branches.get(value)
        if isinstance(root, Branch):
            root.latest, root.repeated = node, boolean and node is root.latest
        if node is not None:
            self._recordings.move_to_end((key, path))
        return node, path

    def likely(self, key: Hashable) -> RecordedForward | None:
        """Return the recording that the last two calls with this key used, if values must be read to find the next one.

        Returns None if the next replay is compared. Also returns None if a value is a number, because an index in the
        inputs may be out of range in a recording for another number.
        """
        root = self._roots.get(key)
        if not isinstance(root, Branch) or not root.repeated:
            return None
        return None if root.latest is None or root.latest.schedule.due else root.latest

    def seen(self, key: Hashable, path: Path) -> bool:
        """Return whether this shape and path occurred before. If not, store them."""
        known = (key, path) in self._seen
        if not known:
            self._seen[key, path] = None
            self._options.setdefault(id(options.current()), options.current())
            while len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        return known

    def why_not(self, key: Hashable, path: Path) -> str | None:
        """Return why calls of this shape and path are not recorded, or None."""
        return self._seen.get((key, path))

    def keep(self, key: Hashable, reads: Sequence[Read], recording: RecordedForward, grown: int) -> str | None:
        """Store a recording, and drop the least recently used ones until the limits are met.

        grown: the number of bytes by which the pool has grown. Returns why the recording isn't stored, or None.
        """
        size = recording.nbytes + grown
        text = options.current().graphs_memory
        bound = in_bytes(text, total_memory(self.device), source="HF_ROCM_GRAPHS_MEMORY=")
        alone = size + recording.shared_nbytes
        if alone > bound:
            return f"its recording needs {alone / 2**20:.0f} MiB, more than HF_ROCM_GRAPHS_MEMORY={text} allows"
        self._failures = 0
        self.recorded += 1
        path: Path = ()
        branches: dict[Any, Any] = self._roots
        place: Hashable = key
        for read in reads:
            branch = branches.get(place)
            if not isinstance(branch, Branch):
                branch = branches[place] = Branch(read.program)
            branches, place = branch.branches, read.value
            path += (read.value,)
        branches[place] = recording
        self._recordings[key, path] = (recording, size)
        while len(self._recordings) > MOST or self.summary()[1] > bound:
            self._drop(next(iter(self._recordings)))
        return None

    def _drop(self, place: tuple[Hashable, Path]) -> None:
        """Drop one recording. Its branches remain while another recording has the same key."""
        recording, _ = self._recordings.pop(place)
        self._seen.pop(place, None)
        recording.wait()
        key, path = place
        if not any(other == key for other, _ in self._recordings):
            self._roots.pop(key, None)
            self._seen.pop((key, ()), None)
            return
        branches: Any = self._roots
        branches[key].latest = None
        for step in (key, *path[:-1]):
            branches = branches[step].branches
        del branches[path[-1]]

    def _keep(self, snapshots: list[Snapshot]) -> None:
        self.snapshots = snapshots
        numbers = {snapshot.number for snapshot in snapshots}
        for place in [place for place in self._recordings if place[0][0] not in numbers]:  # type: ignore[index]
            self._drop(place)
        self.refused = {number: reason for number, reason in self.refused.items() if number in numbers}
        self._paddable = {number: reason for number, reason in self._paddable.items() if number in numbers}

    def clear(self) -> None:
        """Free every recording."""
        with self.lock:
            self._keep([])
            self._roots.clear()
            self._seen.clear()
            self._lengths.clear()

    def summary(self) -> tuple[int, int]:
        """Return the number of recordings and their size in bytes."""
        with self.lock:
            own = sum(size for _, size in self._recordings.values())
            return len(self._recordings), own + self.arena.nbytes

    def latest_recording(self) -> RecordedForward | None:
        """Return the most recently used recording that was compared, or None."""
        with self.lock:
            recordings = [recording for recording, _ in self._recordings.values() if recording.proved]
        return recordings[-1] if recordings else None


def release(model: nn.Module) -> None:
    """Free the recordings of a model."""
    state = _states.take(model)
    if state is not None:
        state.clear()


def refusal(name: str, reason: str) -> GraphError:
    """Return the error for a model whose forwards can't be recorded although graphs are required."""
    return GraphError(
        f"forwards of {name} can't be recorded, and graphs are required",
        facts={"reason": reason},
        hint="leave HF_ROCM_GRAPHS unset (or pass graphs=None) to let the forwards run uncaptured",
    )


_states = States(FORWARDS, State)
state_of, known = _states.of, _states.known
