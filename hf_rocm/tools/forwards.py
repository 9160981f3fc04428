"""The part of `explain` about forwards: which are recorded and replayed, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_rocm.tools.decoding import by_tier, why_uncaptured


def forwards(model: nn.Module, report: dict[str, Any]) -> tuple[str, ...]:
    """Return sentences about the prompts of `model`, and the forwards of models in it that don't generate.

    Returns none if `model` isn't prepared.
    """
    reasons: dict[str, str | None] = report.get("forwards") or {}
    modules = dict(model.named_modules())
    recorded = [(name, modules[name], reason) for name, reason in reasons.items() if name in modules]
    return tuple(
        f"{name}: {line}" if name else line for name, module, reason in recorded for line in _lines(module, reason)
    )


def _lines(model: Any, disabled: str | None) -> Iterator[str]:
    from hf_rocm import features
    from hf_rocm.forwards.decide import refuses_model, refuses_state
    from hf_rocm.forwards.state import SETTINGS, known
    from hf_rocm.generation import suspects
    from hf_rocm.generation.decide import refuses_device
    from hf_rocm.options import Switch

    noun = "prompts" if hasattr(model, "generate") else "forwards"
    if disabled is not None or SETTINGS not in model.__dict__:
        yield f"{noun} run uncaptured: {disabled or 'the model was restored'}"
        return
    state = known(model)
    required = bool(model.__dict__[SETTINGS]["required"])
    reason = None if state is None else state.disabled
    reason = reason or refuses_model(model, Switch.REQUIRED if required else Switch.AUTO) or refuses_state(model)
    if noun == "prompts":
        of_steps = why_uncaptured(model)
        if of_steps is not None and of_steps == refuses_device(model):
            # The sentence about the steps of `generate` has the same reason.
            return
        reason = of_steps or reason
    yield f"{noun} are recorded and replayed" if reason is None else f"{noun} run uncaptured: {reason}"
    feature = features.padding_of(type(model))
    changed = None if feature is None else features.refuses(feature)
    if changed is not None:
        yield f"calls are not padded: {changed}"
    if state is None:
        return
    recordings, nbytes = state.summary()
    if state.recorded:
        yield f"recorded {noun}: {state.recorded}, replayed {noun}: {state.replayed}"
    latest = state.latest_recording()
    if latest is not None:
        yield f"kernels of the most recently used recording: {by_tier(latest.routes)}"
    if state.compared:
        yield f"{state.compared} of the replayed {noun} were compared again with uncaptured {noun}"
    if recordings:
        yield f"recordings kept: {recordings} ({nbytes / 2**20:.1f} MiB)"
    for length, count in sorted(state.padded.items()):
        yield f"padded to {length} tokens: {count} call{'s' * (count != 1)}"
    for slower, count in sorted(state.slower.items(), key=lambda item: item[0] or 0):
        kinds = "1 kind of call" if count == 1 else f"{count} kinds of calls"
        if slower is None:
            yield f"no longer replayed: {kinds}, because a replay takes longer"
        else:
            yield f"no longer padded to {slower} tokens: {kinds}, because the padded forward takes longer"
    if state.unpadded is not None:
        yield f"calls are no longer padded: {state.unpadded}"
    fault = suspects.fault_of(model.device) if required else None
    if fault is not None:
        yield f"recorded because graphs are required, though {suspects.reason(fault)}"
    for reason, count in state.turned_away.most_common():
        yield f"uncaptured × {count}: {reason}"
