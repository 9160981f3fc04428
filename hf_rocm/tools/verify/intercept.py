"""Intercept the calls of modules without changing the modules.

A hook or a `forward` attribute on an instance would change the route, because such layers don't run fused. So
`nn.Module.__call__` is replaced during a run, and the instances stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_rocm import patches
from hf_rocm.patches import Change

# (module, positional arguments, keyword arguments, original call) → the result
Interceptor = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]


@contextmanager
def intercepted(interceptors: Mapping[int, Interceptor]) -> Iterator[None]:
    """Within the block, pass every call of a module to the function for its `id()`, if any. Blocks can be nested."""

    def make(change: Change) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            intercept = interceptors.get(id(self)) if change.live else None
            if intercept is None:
                return change.original(self, *args, **kwargs)
            return intercept(self, args, kwargs, partial(change.original, self))

        return call

    with patches.applied(Change(nn.Module, "__call__", make)):
        yield


def first_tensor(value: Any) -> Tensor | None:
    """Return a module's main result, a tensor or the first element of a tuple or list, or None if it isn't a tensor."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the hidden states that are passed to a layer, or None if there are none."""
    value = args[0] if args else kwargs.get("hidden_states")
    return value if isinstance(value, Tensor) else None


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same arguments with other hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}
