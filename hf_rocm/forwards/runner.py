"""One call of a model's forward: run uncaptured at first, recorded when its shape comes again, then replayed.

The second call with the same shapes, flags and host reads is observed and recorded, and the third is the first that is
replayed; `generation.schedule` decides when a replay is compared with an uncaptured forward again. The kernels of a
replay are queued before the model's state is compared, so that the comparison costs no time; a replay writes only to
memory of its recording, and its results are dropped if the state differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_rocm.forwards import decide
from hf_rocm.forwards.recorded import RecordedForward, observe
from hf_rocm.forwards.snapshot import Snapshot
from hf_rocm.forwards.state import State
from hf_rocm.generation import incident
from hf_rocm.generation.step import Inputs, Unrecordable, put_together, take_apart

_log = logging.getLogger("hf_rocm")

_NOT_REPLAYED: Any = object()


def run(model: Any, state: State, stock: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run or replay one call. Returns what `stock(*args, **kwargs)` would return, in tensors that the caller owns."""
    reason = decide.refuses_call(model, state.device)
    if reason is not None:
        state.turn_away(reason)
        return stock(*args, **kwargs)
    with state.lock:
        output = _recorded(model, state, stock, args, kwargs)
    return stock(*args, **kwargs) if output is _NOT_REPLAYED else output


def _recorded(
    model: Any, state: State, stock: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The output, or `_NOT_REPLAYED` if the call has to run as stock."""
    if state.disabled is not None:  # by another thread, while this one waited
        return _NOT_REPLAYED
    arguments: dict[str, Any] = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}

    def forward(tensors: Sequence[Tensor]) -> Any:
        given = put_together(arguments, tensors)
        first = [given.pop(f"argument {index}") for index in range(len(args))]
        return stock(*first, **given)

    snapshot = state.snapshots[-1] if state.snapshots else None
    if snapshot is None or not snapshot.in_place():
        snapshot = _begin(model, state)
    for _ in range(_STATES):
        inputs, reason = _inputs(arguments, state.device)
        reason = state.refused.get(snapshot.number, reason)
        key = (snapshot.number, decide.surroundings(), inputs.key)
        recording, path = (None, ()) if reason is not None else state.find(key, inputs.tensors)
        compared_now = recording is not None and (
            recording.schedule.due or recording.alarm.rings(recording.schedule.replays)
        )
        copies = None if recording is None or compared_now else recording.copies(inputs.tensors)
        if not snapshot.unchanged(model):
            snapshot = _begin(model, state)
            continue
        if recording is None:
            reason = reason or state.why_not(key, path)
            if reason is not None:
                state.turn_away(reason)
            elif state.seen(key, path):
                return _record(model, state, snapshot, key, path, forward, inputs)
            return _NOT_REPLAYED
        state.unsettled = 0
        if copies is None:
            return _compare(model, state, recording, forward, inputs)
        recording.schedule.count()
        state.replayed += 1
        return recording.output(copies, inputs.tensors)
    return _NOT_REPLAYED


# The largest number of states of the model that are examined in one call; another thread may change it meanwhile.
_STATES = 3


def _inputs(arguments: Mapping[str, Any], device: torch.device) -> tuple[Inputs, str | None]:
    """The split arguments, and the reason why a call with them runs uncaptured, or None."""
    try:
        inputs = take_apart(arguments)
    except Unrecordable as error:
        return Inputs((), ()), str(error)
    reasons = (decide.refuses_tensor(tensor, device) for tensor in inputs.tensors)
    reason = next((reason for reason in reasons if reason is not None), None)
    return inputs, reason if inputs.tensors else "it has no tensor among its arguments"


def _begin(model: Any, state: State) -> Snapshot:
    """Make the model's current state the one that recordings are made for."""
    earlier = state.switch(model)
    if earlier is not None:
        return earlier
    snapshot = state.new_snapshot(model)
    if state.disabled is None:
        reason = decide.refuses_state(model)
        if reason is not None:
            state.refused[snapshot.number] = reason
    return snapshot


def _record(
    model: Any,
    state: State,
    snapshot: Snapshot,
    key: Any,
    path: Any,
    forward: Callable[[Sequence[Tensor]], Any],
    inputs: Inputs,
) -> Any:
    """Observe the call for its result, then record it. The next call of this shape is the first that is replayed."""
    observed = observe(forward, inputs, snapshot.tensors)
    if not snapshot.unchanged(model):
        _begin(model, state)  # it has kept something in the model, which the next call may use
        return observed.output
    reason = observed.reason
    if reason is None:
        before = _reserved(state.device)
        try:
            recording = RecordedForward(state.recorder(), inputs, forward, observed, snapshot.tensors)
        except Unrecordable as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  the forward itself has just run, so its recording failed
            text = str(error).strip() or type(error).__name__
            reason = f"the forward can't be recorded: {text.splitlines()[0]}"
            _log.warning("%s: %s", state.name, reason)
        else:
            grown = max(0, _reserved(state.device) - before)
            reason = state.keep(key, observed.reads, recording, grown)
    if reason is not None:
        state.failed(key, path, reason)
        state.turn_away(reason)
    return observed.output


def _compare(
    model: Any,
    state: State,
    recording: RecordedForward,
    forward: Callable[[Sequence[Tensor]], Any],
    inputs: Inputs,
) -> Any:
    """Replay the call and run it uncaptured. Returns the uncaptured result."""
    compared = recording.compare(forward, inputs)
    schedule = recording.schedule
    if compared.agrees:
        if recording.alarm.rang():
            recording.alarm.ignored = True  # the model's own outputs are not finite
        if schedule.proven:
            state.replayed += 1
            state.compared += 1
        schedule.agreed()
        return compared.output
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
    return compared.output


def _reserved(device: torch.device) -> int:
    """The bytes that PyTorch has reserved on this device: a recording may make the memory pool grow."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
