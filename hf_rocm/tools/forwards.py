"""The part of `explain` about forward passes: which are recorded and replayed, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_rocm.tools.decoding import by_tier


def forwards(model: nn.Module, report: dict[str, Any]) -> tuple[str, ...]:
    """Return sentences about the models in `model` that don't generate; none if `model` isn't prepared."""
    reasons: dict[str, str | None] = report.get("forwards") or {}
    modules = dict(model.named_modules())
    encoders = [(name, modules[name], reason) for name, reason in reasons.items() if name in modules]
    return tuple(
        f"{name}: {line}" if name else line
        for name, encoder, reason in encoders
        for line in _encoder_lines(encoder, reason)
    )


def _encoder_lines(model: Any, disabled: str | None) -> Iterator[str]:
    from hf_rocm import features
    from hf_rocm.forwards.decide import refuses_model, refuses_state
    from hf_rocm.forwards.state import SETTINGS, known
    from hf_rocm.generation import suspects
    from hf_rocm.options import Switch

    if disabled is not None or SETTINGS not in model.__dict__:
        yield f"forwards run uncaptured: {disabled or 'the model was restored'}"
        return
    state = known(model)
    required = bool(model.__dict__[SETTINGS]["required"])
    reason = None if state is None else state.disabled
    reason = reason or refuses_model(model, Switch.REQUIRED if required else Switch.AUTO) or refuses_state(model)
    yield "forwards are recorded and replayed" if reason is None else f"forwards run uncaptured: {reason}"
    feature = features.padding_of(type(model))
    changed = None if feature is None else features.refuses(feature)
    if changed is not None:
        yield f"calls are not padded: {changed}"
    if state is None:
        return
    recordings, nbytes = state.summary()
    if state.recorded:
        yield f"recorded forwards: {state.recorded}, replayed forwards: {state.replayed}"
    latest = state.latest_recording()
    if latest is not None:
        yield f"kernels of the most recently used recording: {by_tier(latest.routes)}"
    if state.compared:
        yield f"{state.compared} of the replayed forwards were compared again with uncaptured forwards"
    if recordings:
        yield f"recordings kept: {recordings} ({nbytes / 2**20:.1f} MiB)"
    for length, count in sorted(state.padded.items()):
        yield f"padded to {length} tokens: {count} call{'s' * (count != 1)}"
    for length, count in sorted(state.slower.items()):
        kinds = "1 kind of call" if count == 1 else f"{count} kinds of calls"
        yield f"no longer padded to {length} tokens: {kinds}, because the padded forward takes longer"
    if state.unpadded is not None:
        yield f"calls are no longer padded: {state.unpadded}"
    fault = suspects.fault_of(model.device) if required else None
    if fault is not None:
        yield f"recorded because graphs are required, though {suspects.reason(fault)}"
    for reason, count in state.turned_away.most_common():
        yield f"uncaptured × {count}: {reason}"
