"""Beam search: within it, calls of the model over a `DecodeCache` that has the prompt are recorded steps.

transformers' loop for samples calls what `get_compiled_call` returns; its loop for beams calls the model itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_rocm import features, patches
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.methods import own
from hf_rocm.patches import Change

MODES = ("beam_search", "beam_sample")

Step = Callable[[Mapping[str, Any]], Any]


def refuses(model: Any) -> str | None:
    """Why beams of this model are not decoded over recorded steps, or None."""
    from transformers import GenerationMixin

    if own(type(model), "_beam_search", GenerationMixin):
        return f"{type(model).__name__} overrides _beam_search"
    temporary = hasattr(GenerationMixin, "_temporary_reorder_cache")  # there, caches of this kind reorder themselves
    if "gptbigcode" in type(model).__name__.lower() if temporary else hasattr(model, "_reorder_cache"):
        return f"{type(model).__name__} reorders its cache itself"
    return features.refuses("beams")


@contextmanager
def stepping(model: nn.Module, cache: DecodeCache, step: Step) -> Iterator[None]:
    """Within the block, this thread's calls of the model over this cache, after the prompt, are calls of `step`.

    `step` takes the keyword arguments of the call. The calls of the model that it makes itself are not affected.
    """
    before = _thread.steps
    _thread.steps = model, cache, step
    try:
        with patches.applied(Change(type(model), "__call__", _calls_steps, key=__name__)):
            yield
    finally:
        _thread.steps = before


class _Thread(threading.local):
    steps: tuple[nn.Module, DecodeCache, Step] | None = None


_thread = _Thread()


def _calls_steps(change: Change) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = _thread.steps
        if change.live and steps is not None and not args:
            model, cache, step = steps
            if self is model and kwargs.get("past_key_values") is cache and cache.is_compileable:
                _thread.steps = None
                try:
                    return step(kwargs)
                finally:
                    _thread.steps = steps
        return change.call_of(self)(*args, **kwargs)

    return __call__
