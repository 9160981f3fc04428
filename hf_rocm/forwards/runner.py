"""One call of a model's forward: uncaptured at first, recorded when its shape occurs again, then replayed.

The second call with the same shapes, flags and host reads is observed and recorded, and the third is the first to be
replayed. Calls of encoders, and prompts, that differ only in length are padded and share a recording; see `padding`.
`generation.schedule` decides which replays are compared with an uncaptured forward. The kernels of a replay are queued
before the model's state is compared, so that the host compares it while the device computes. A replay writes only to
the memory of recordings, and its results are dropped if the state differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.forwards import decide
from hf_rocm.forwards.ahead import NOTHING_LATER, before_replay
from hf_rocm.forwards.outputs import Outputs
from hf_rocm.forwards.padding import Padded, Padding
from hf_rocm.forwards.recorded import RecordedForward, observe
from hf_rocm.forwards.snapshot import Snapshot
from hf_rocm.forwards.state import Path, State
from hf_rocm.generation import incident
from hf_rocm.generation.fingerprint import surroundings
from hf_rocm.generation.step import Inputs, Unrecordable, first_line, put_together, take_apart

_log = logging.getLogger("hf_rocm")

# What `run` returns if it has run nothing.
NOT_RUN: Any = object()


class Kind(NamedTuple):
    """A kind of call, whose recordings are separate.

    key: distinguishes it from the model's other kinds. pads: how its calls are padded; None: not at all. owned: the
    first key of the output, whose tensors are copied for the caller, and raise the alarm if they are not finite; None:
    all tensors are. The others are valid until the next replay. finish(output): copies them and returns the final
    output, in the call's stream and before any other call is replayed; it may be called more than once. None: the
    output is final.
    """

    key: Hashable
    pads: Padding | None = None
    owned: str | None = None
    finish: Callable[[Any], Any] | None = None


def run(
    model: Any, state: State, stock: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], kind: Kind
) -> Any:
    """Run or replay one call of a method, whose stock implementation is `stock`.

    Returns what `stock(*args, **kwargs)` would return, in tensors that the caller owns, after `kind.finish`; or
    `NOT_RUN` if the caller must run it.
    """
    reason = decide.refuses_call(model, state.device)
    if reason is not None:
        state.turn_away(reason)
        return NOT_RUN
    with state.lock:
        output = _recorded(model, state, _UserCall(stock, args, kwargs, kind))
        return output if output is NOT_RUN or kind.finish is None else kind.finish(output)


class _UserCall(NamedTuple):
    """A call as the user made it; the fields are arguments of `run`."""

    stock: Callable[..., Any]
    positional: Sequence[Any]
    named: Mapping[str, Any]
    kind: Kind

    def __call__(self) -> Any:
        return self.stock(*self.positional, **self.named)


class _Call(NamedTuple):
    """A call in a form that can be recorded.

    forward: runs the call with given tensors. reason: why it runs uncaptured, or None. padded: its padded form, or
    None.
    """

    user_call: _UserCall
    forward: Callable[[Sequence[Tensor]], Any]
    inputs: Inputs
    reason: str | None
    padded: Padded | None = None


class _Lookup(NamedTuple):
    """A call with the key and the path of its recording.

    recording, reason: the recording, or the reason why there is none; both are None if the call has not been recorded
    yet. copies: the outputs of a replay that is already queued, or None. before: a context for work that does not wait
    for that replay.
    """

    call: _Call
    key: Hashable
    path: Path
    recording: RecordedForward | None
    reason: str | None
    copies: list[Tensor] | None = None
    before: AbstractContextManager[None] = NOTHING_LATER


def _recorded(model: Any, state: State, user_call: _UserCall) -> Any:
    """Return the output, or `NOT_RUN`."""
    if state.disabled is not None:
        # Another thread disabled recording while this one waited.
        return NOT_RUN
    snapshot = state.snapshots[-1] if state.snapshots else None
    if snapshot is None or not snapshot.in_place():
        snapshot = _begin(model, state)
    for _ in range(_STATES):
        prior = _find(state, snapshot, _call(state, user_call))
        if prior.recording is None and prior.reason is None:
            prior = _find_padded(model, state, snapshot, user_call) or prior
        call, key, path, recording, reason, copies, _ = prior
        compared_now = recording is not None and (
            recording.schedule.due or recording.alarm.poll(recording.schedule.replays)
        )
        if recording is None or compared_now:
            copies = None
        elif copies is None:
            copies = recording.copies(call.inputs.tensors, call.padded)
        if not snapshot.unchanged(model):
            snapshot = _begin(model, state)
            continue
        if call.padded is not None:
            state.padded[call.padded.bucket] += 1
        if recording is None:
            reason = reason or state.why_not(key, path)
            if reason is not None:
                state.turn_away(reason)
            elif state.seen(key, path) or call.padded is not None:
                return _record(model, state, snapshot, key, path, call)
            return NOT_RUN
        state.unsettled = 0
        if copies is None:
            return _compare(model, state, key, path, recording, call)
        recording.schedule.count()
        state.replayed += 1
        return recording.output(copies, call.inputs.tensors)
    return NOT_RUN


def _call(state: State, user_call: _UserCall, padded: Padded | None = None) -> _Call:
    """Return the call in a form that can be recorded. padded: its padded form, or None."""
    args = user_call.positional if padded is None else ()
    named = user_call.named if padded is None else padded.arguments
    arguments: dict[str, Any] = {**{f"argument {index}": value for index, value in enumerate(args)}, **named}

    def forward(tensors: Sequence[Tensor]) -> Any:
        filled = put_together(arguments, tensors)
        first = [filled.pop(f"argument {index}") for index in range(len(args))]
        return user_call.stock(*first, **filled)

    return _Call(user_call, forward, *_inputs(arguments, state.device), padded)


def _find(state: State, snapshot: Snapshot, call: _Call) -> _Lookup:
    """Find the recording of a call. The host may have to read values to find it.

    If earlier calls suggest a recording, its replay is queued first, so that the device computes while the host waits.
    """
    reason = state.refused.get(snapshot.number, call.reason)
    form: Hashable = call.inputs.key if call.padded is None else ("padded", call.inputs.key)
    key = (snapshot.number, id(options.current()), surroundings(), call.user_call.kind.key, form)
    if reason is not None:
        return _Lookup(call, key, (), None, reason)
    likely = state.likely(key)
    before = NOTHING_LATER if likely is None else before_replay(state.device)
    copies = None if likely is None else likely.copies(call.inputs.tensors, call.padded)
    with before:
        recording, path = state.find(key, call.inputs.tensors)
    return _Lookup(call, key, path, recording, None, copies if recording is likely else None, before)


def _find_padded(model: Any, state: State, snapshot: Snapshot, user_call: _UserCall) -> _Lookup | None:
    """Find the recording of a call's padded form, or return None if the call is not padded.

    A call is padded only if calls of several lengths share that form, and if the values of its arguments allow it.
    """
    pads = user_call.kind.pads
    if pads is None or state.refuses_padding(model, snapshot, pads) is not None:
        return None
    padded = pads.pad(model, user_call.stock, user_call.positional, user_call.named)
    if padded is None:
        return None
    prior = _find(state, snapshot, _call(state, user_call, padded))
    if prior.reason is not None or state.why_not(prior.key, prior.path) is not None:
        return None
    if prior.recording is None and not state.lengths_differ(prior.key, padded.length):
        return None
    with prior.before:
        return prior if padded.holds() else None


# The largest number of model states that are examined in one call, in case another thread keeps changing the model.
_STATES = 3


def _inputs(arguments: Mapping[str, Any], device: torch.device) -> tuple[Inputs, str | None]:
    """Return the split arguments, and the reason why a call with them runs uncaptured, or None."""
    try:
        inputs = take_apart(arguments)
    except Unrecordable as error:
        return Inputs((), ()), str(error)
    reasons = (decide.refuses_tensor(tensor, device) for tensor in inputs.tensors)
    reason = next((reason for reason in reasons if reason is not None), None)
    return inputs, reason if inputs.tensors else "it has no tensor among its arguments"


def _begin(model: Any, state: State) -> Snapshot:
    """Return a snapshot of the model's current state, an earlier one or a new one, and make it the current one."""
    earlier = state.switch(model)
    if earlier is not None:
        return earlier
    snapshot = state.new_snapshot(model)
    if state.disabled is None:
        reason = decide.refuses_state(model) or snapshot.refused
        if reason is not None:
            state.refused[snapshot.number] = reason
    return snapshot


def _record(model: Any, state: State, snapshot: Snapshot, key: Hashable, path: Path, call: _Call) -> Any:
    """Run and observe the call, then record it. The next call of this shape is the first to be replayed."""
    try:
        observed = observe(call.forward, call.inputs, snapshot.tensors)
    except Unrecordable as error:
        state.failed(key, path, str(error))
        state.turn_away(str(error))
        return NOT_RUN
    except Exception as error:  # noqa: BLE001  the caller runs the call again, which raises the user's error
        failure = f"the forward raised {type(error).__name__} while it was observed: {first_line(error)}"
        if isinstance(error, torch.cuda.OutOfMemoryError):
            state.failed(key, path, failure)
        state.turn_away(failure)
        return NOT_RUN
    output = observed.output if call.padded is None else call.user_call()
    if not snapshot.unchanged(model):
        # The call has stored something in the model that the next call may use.
        _begin(model, state)
        return output
    reason, kind = observed.reason, call.user_call.kind
    if reason is None:
        before = _reserved(state.device)
        try:
            cuts = None if call.padded is None else _cuts(call.padded, snapshot.tensors, observed.output, output)
            recording = RecordedForward(
                state.recorder(),
                call.inputs,
                call.forward,
                observed,
                snapshot.tensors,
                arena=state.arena,
                owned=kind.owned,
            )
        except Unrecordable as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  the forward itself has just succeeded, so its recording failed
            reason = f"the forward can't be recorded: {first_line(error)}"
            _log.warning("%s: %s", state.name, reason)
        else:
            recording.cuts = cuts
            if not _padding_agrees(model, state, recording, call, observed.output, output):
                return output
            grown = max(0, _reserved(state.device) - before)
            reason = state.keep(key, observed.reads, recording, grown)
    if reason is not None:
        state.failed(key, path, reason)
        state.turn_away(reason)
    return output


def _cuts(padded: Padded, weights: Sequence[Tensor], padded_output: Any, unpadded_output: Any) -> list[tuple[int, ...]]:
    return padded.cuts(Outputs(unpadded_output, (), weights), Outputs(padded_output, (), weights))


def _padding_agrees(
    model: Any,
    state: State,
    recording: RecordedForward,
    call: _Call,
    padded_output: Any,
    unpadded_output: Any,
    *,
    earlier: int = 0,
) -> bool:
    """Return whether a padded forward agrees with the unpadded one. If not, stop padding calls.

    Returns True for calls that are not padded. earlier: the number of results since the last comparison.
    """
    pads = call.user_call.kind.pads
    if call.padded is None or pads is None or recording.cuts is None:
        return True
    tensors = call.padded.cut(Outputs(padded_output, (), ()).tensors, recording.cuts)
    reason = pads.differs(model, tensors, Outputs(unpadded_output, (), ()).tensors)
    if reason is not None:
        state.stop_padding(f"{reason}; up to {earlier} earlier results may differ as much" if earlier else reason)
    return reason is None


def _compare(model: Any, state: State, key: Hashable, path: Path, recording: RecordedForward, call: _Call) -> Any:
    """Replay the call and compare the result with an uncaptured run.

    For a padded call, also compare the padded forward with the unpadded one. Returns the result of the uncaptured,
    unpadded run.
    """
    compared = recording.compare(call.forward, call.inputs)
    schedule = recording.schedule
    output, slower = compared.output, False
    if schedule.comparisons == _TIMED and _is_timed(state.device):
        output, slower = _against_uncaptured(state.device, recording, call)
    elif call.padded is not None:
        output = call.user_call()
    if compared.agrees:
        if recording.alarm.triggered():
            # The model's own outputs are not finite.
            recording.alarm.ignored = True
        if not _padding_agrees(model, state, recording, call, compared.output, output, earlier=schedule.since):
            return output
        if schedule.proven:
            state.replayed += 1
            state.compared += 1
        schedule.agreed()
        if slower:
            state.drop_slower(key, path, None if call.padded is None else call.padded.bucket)
        return output
    reason = f"a replayed forward differed from the forward itself by up to {compared.difference:.3g}"
    if schedule.since:
        reason += f"; up to {schedule.since} earlier results may be wrong too"
    incident.keep(
        model,
        reason=reason,
        operators=compared.operators,
        replays=schedule.replays + 1,
        unproven=schedule.since,
    )
    state.disable(reason)
    return output


# A replay is timed in the comparison that follows this number of comparisons: all kernels have run by then.
_TIMED = 2


def _is_timed(device: torch.device) -> bool:
    return device.type == "cuda"


def _against_uncaptured(device: torch.device, recording: RecordedForward, call: _Call) -> tuple[Any, bool]:
    """Return the output of the uncaptured, unpadded call, and whether a replay takes longer.

    If the GPU takes longer to run the call than the host takes to launch it, padding and copies only add work.
    """

    def replay() -> None:
        inputs, finish = call.inputs.tensors, call.user_call.kind.finish
        output = recording.output(recording.copies(inputs, call.padded), inputs)
        if finish is not None:
            finish(output)

    output, uncaptured = _timed(device, lambda: call.user_call())
    return output, min(_timed(device, replay)[1] for _ in range(2)) > uncaptured


def _timed(device: torch.device, run: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `run`, and its duration on the host and the device in seconds."""
    _wait(device)
    began = time.perf_counter()
    result = run()
    _wait(device)
    return result, time.perf_counter() - began


def _wait(device: torch.device) -> None:
    """Wait for the current stream only: waiting for the device is an error while another thread captures a graph."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _reserved(device: torch.device) -> int:
    """Return the bytes that PyTorch has reserved on this device. A recording may make the memory pool grow."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
