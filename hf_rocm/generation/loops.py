"""Use recorded steps in the loops of `generate` that call the model directly, with a `DecodeCache`.

transformers' sampling loop calls the function that `get_compiled_call` returns; its loops for beams and drafts do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_rocm import patches
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.patches import Change

Step = Callable[[Mapping[str, Any]], Any]


@contextmanager
def stepping(model: nn.Module, cache: DecodeCache, step: Step) -> Iterator[None]:
    """Within the block, this thread's calls of the model with this cache call `step`, except for the prompt.

    `step` takes the keyword arguments of the call. Calls with positional arguments, and calls of the model from within
    `step`, are not affected.
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
