"""Stand-ins for tensors that a loop of transformers passes on without reading them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _computed(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def operator(self: StandIn, *args: Any) -> Any:
        return function(self.tensor(), *map(_real, args))

    return operator


# Python looks these methods up on the class, without calling `__getattr__`.
_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "neg", "pos", "abs", "matmul", "rmatmul", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"),
    *("invert", "bool", "int", "float", "complex", "index", "len", "iter", "contains", "setitem"),
)
_Operators: Any = type("Operators", (), {f"__{name}__": _computed(f"__{name}__") for name in _OPERATORS})


class StandIn(_Operators):
    """Represents a tensor that the loop passes on without reading it. Any other use computes the tensor."""

    def tensor(self) -> Tensor:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    # Python sets `__hash__` to None in a class that defines `__eq__`, such as `_Operators`.
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_real(args), **{name: _real(value) for name, value in (kwargs or {}).items()})


def _real(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_real, value))
    return value.tensor() if isinstance(value, StandIn) else value
