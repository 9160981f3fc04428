"""What `explain` says of decoding: whether steps are recorded and replayed, what was not, and why."""

from __future__ import annotations

from typing import Any

from torch import nn


def decoding(model: nn.Module, report: dict[str, Any]) -> tuple[str, ...]:
    """Sentences about this model's `generate`; none for a model that was not prepared or doesn't generate."""
    found = report.get("graphs")
    if found is None or not hasattr(model, "generate"):
        return ()
    if found["off"] is not None:
        return (f"steps run uncaptured: {found['off']}",)
    from hf_rocm.generation.decide import refuses_device, refuses_model
    from hf_rocm.generation.inputs import noted
    from hf_rocm.generation.inputs import refuses as refuses_inputs
    from hf_rocm.generation.state import known

    state = known(model)
    reason = (state.disabled if state is not None else None) or refuses_model(model) or refuses_device(model)
    lines = ["steps are recorded and replayed" if reason is None else f"steps run uncaptured: {reason}"]
    if state is not None:
        caches, nbytes = state.pool.summary()
        lines.append(f"so far {state.recorded} recorded, {state.replayed} replayed, in {state.calls} calls of generate")
        lines.append(f"kept for the next call: {caches} caches of {nbytes / 2**20:.1f} MiB in all")
        lines += [f"uncaptured × {count}: {why}" for why, count in state.turned_away.most_common()]
    left = noted(model) or refuses_inputs(model)
    if left is not None:
        lines.append(f"the steps' inputs are prepared by transformers: {left}")
    return tuple(lines)
