"""Count the changes of a model's experts implementation while calls to `generate` decode.

From transformers 5.0 on, `generate` replaces the implementation `grouped_mm` with `batched_mm` while it decodes, except
on the CPU in later releases. All threads that use the model run this implementation, so it may change between and
within the steps of a call. Recordings are made for one implementation, and its results differ from those of another by
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_rocm.generation.state import state_of


@contextmanager
def switching(model: Any, stock: Callable[[], Any]) -> Iterator[None]:
    """Replaces `_optimize_model_for_decode`: increments `State.switches` before and after both changes.

    A model without experts, or with `experts_implementation="eager"`, is never switched, so nothing is counted. This
    matters because, from transformers 5.0 on, `generate` enters this context for every model, in some releases in every
    step.
    """
    if {implementation(model), getattr(model.config, "_experts_implementation", None)} <= {None, "eager"}:
        with stock():
            yield
        return
    state = state_of(model)
    state.switches += 1
    try:
        with stock():
            state.switches += 1
            yield
            state.switches += 1
    finally:
        state.switches += 1


def implementation(model: Any) -> str | None:
    """The experts implementation of the model, or of its text model; None if it has none."""
    name: str | None = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)
    return name
