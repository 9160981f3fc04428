"""The part of `explain` about decoding: which steps are recorded and replayed, and why other steps are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn


class Served(Protocol):
    """An operation, and the tier that serves it."""

    @property
    def operation(self) -> str: ...
    @property
    def tier(self) -> str: ...


def by_tier(served: Iterable[Served]) -> str:
    """Return the operations, each once, grouped by tier: `linear, rope by triton; finish_step by torch`."""
    tiers: dict[str, dict[str, None]] = {}
    for route in served:
        tiers.setdefault(route.tier, {})[route.operation] = None
    return "; ".join(f"{', '.join(operations)} by {tier}" for tier, operations in tiers.items())


def why_uncaptured(model: Any) -> str | None:
    """Return why the steps of a generating model run uncaptured, or None if nothing prevents recording them."""
    from hf_rocm.generation.decide import refuses_device, refuses_model
    from hf_rocm.generation.state import known

    state = known(model)
    return (None if state is None else state.disabled) or refuses_model(model) or refuses_device(model)


def decoding(model: nn.Module, report: dict[str, Any]) -> tuple[str, ...]:
    """Return sentences about the model's `generate`; none if the model is not prepared or doesn't generate."""
    graphs = report.get("graphs")
    if graphs is None or not hasattr(model, "generate"):
        return ()
    from hf_rocm.generation import continuous_batching, suspects
    from hf_rocm.generation.decide import generator_of

    model = generator_of(model)
    batches = continuous_batching.attention_of(model), continuous_batching.describe(model)
    of_batches = [line for line in batches if line is not None]
    if graphs["off"] is not None:
        return (f"steps run uncaptured: {graphs['off']}", *of_batches)
    from hf_rocm.generation.inputs import noted
    from hf_rocm.generation.inputs import refuses as refuses_inputs
    from hf_rocm.generation.state import known

    state = known(model)
    required = state is not None and state.required
    reason = why_uncaptured(model)
    fault = None if reason is not None else suspects.fault_of(model.device)
    reason = reason or suspects.refuses(model.device, required=required)
    lines = ["steps are recorded and replayed" if reason is None else f"steps run uncaptured: {reason}"]
    if state is not None:
        caches, nbytes = state.pool.summary()
        # `calls` counts the calls to generate that use a cache from hf_rocm.
        if state.calls:
            lines.append(
                f"recorded steps: {state.recorded}, replayed steps: {state.replayed}, calls to generate: {state.calls}"
            )
        if state.routes:
            lines.append(f"kernels of the last recorded step: {by_tier(state.routes)}")
        if state.compared:
            lines.append(f"{state.compared} of the replayed steps were compared again with uncaptured steps")
        if caches:
            lines.append(f"caches kept for the next call: {caches} ({nbytes / 2**20:.1f} MiB)")
        if fault is not None and required:
            lines.append(f"recorded because graphs are required, though {suspects.reason(fault)}")
        if state.plain_assistants:
            lines.append(f"uncaptured × {state.plain_assistants}: drafts of an assistant model that is not prepared")
        lines += [f"uncaptured × {count}: {cause}" for cause, count in state.turned_away.most_common()]
    refusal = noted(model) or refuses_inputs(model)
    if refusal is not None:
        lines.append(f"the steps' inputs are prepared by transformers: {refusal}")
    return (*lines, *of_batches)
