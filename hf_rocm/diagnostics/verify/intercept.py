"""Standing around the calls of modules without touching them.

A hook, or a forward on an instance, would itself change the route: layers with hooks don't run fused. So the call that
all modules inherit is replaced while a run is watched, and nothing on any instance is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

# (module, positional arguments, keyword arguments, the call itself) → what the call returns
Around = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]


@contextmanager
def intercepted(arounds: Mapping[int, Around]) -> Iterator[None]:
    """Within the block, calls of the modules with these ids go through the function given for each. Blocks nest."""
    found = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = arounds.get(id(self))
        if around is None:
            return found(self, *args, **kwargs)
        return around(self, args, kwargs, partial(found, self))

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = found  # type: ignore[method-assign]


def first_tensor(value: Any) -> Tensor | None:
    """A module's own result: the tensor itself, or the first of a tuple."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden states that a layer is called with."""
    value = args[0] if args else kwargs.get("hidden_states")
    return value if isinstance(value, Tensor) else None


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with other hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}
