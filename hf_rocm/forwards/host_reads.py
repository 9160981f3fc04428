"""The values that a forward reads on the host, and how to compute them from the inputs of a later call.

A forward may read a tensor on the host and choose a path by its value. For example, transformers omits a mask that
masks nothing. A recording contains one path, so the operators that compute such a value from the inputs are stored as a
`Program`, which is evaluated before a replay. The recording is used only if the values are the same. Nothing can be
read while a forward is recorded; the stored values are returned in order instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm.generation.step import Unrecordable

# The largest number of operators that are evaluated for one value, and the largest total size of one operator's results
# that are stored for this purpose.
_LONGEST = 64
_LARGEST = 2**26  # bytes

# The largest number of elements of a tensor that may have been created from host values.
_CONSTANT = 16

# An operator with a kernel for this key is a composition of other operators.
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# `torch.tensor` applies this operator to the tensor that it creates. Despite its schema, it does not write to memory.
_DETACH = torch.ops.aten.detach_.default

Value = bool | int | float


class _Step(NamedTuple):
    """One operator. outputs: the number of tensors that it returns; 0 for the operator that returns the value.

    positional, named: functions that return its positional and keyword arguments, from the tensors of all places; see
    `Program`.
    """

    operator: Callable[..., Any]
    positional: Callable[[Sequence[Tensor]], Any]
    named: Callable[[Sequence[Tensor]], Any]
    outputs: int

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        return self.operator(*self.positional(tensors), **self.named(tensors))


class Program(NamedTuple):
    """The operators that compute one value from the inputs.

    Places are numbered in this order: the inputs, the constants, and the results of the operators.
    """

    constants: tuple[Tensor, ...]
    steps: tuple[_Step, ...]
    last: _Step

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[type, Value]:
        """Compute the value for these inputs, with its type. The host waits for the device."""
        tensors = [*inputs, *self.constants]
        for step in self.steps:
            results = _tensors(step(tensors))
            assert len(results) == step.outputs
            tensors += results
        return typed(self.last(tensors))


def typed(value: Value) -> tuple[type, Value]:
    """Return the value with its type, so that values of different types are never equal: 1 is not True."""
    return type(value), value


class Read(NamedTuple):
    program: Program
    value: tuple[type, Value]


class _BasicOperators(TorchDispatchMode):
    """Calls `run` instead of every basic operator.

    In inference mode, PyTorch also dispatches composite operators, which are decomposed here: a composite operator may
    contain a read on the host (`is_nonzero`) or a copy (`to`), which its schema does not show.
    """

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), _COMPOSITE):
            with self:
                return operator._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        return self.run(operator, args, kwargs or {})

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Reads(_BasicOperators):
    """Collects the values that a forward reads on the host. reason: why the forward can't be recorded, or None."""

    def __init__(self, inputs: Sequence[Tensor], weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.reason: str | None = None
        self._inputs = {id(tensor): index for index, tensor in enumerate(inputs)}
        self._weights = {id(tensor): tensor for tensor in weights}
        # id → a result, and the index of its operator in `_log`
        self._kept: dict[int, tuple[Tensor, int]] = {}
        # id → a result whose operator was not stored
        self._dropped: dict[int, weakref.ref[Tensor]] = {}
        self._log: list[tuple[Any, Any, Any, list[Tensor]]] = []
        # Storages that the forward created.
        self._made: set[int] = set()
        self._written: set[int] = set()
        # Small tensors of unknown origin; see `finish`.
        self._unknown: list[weakref.ref[Tensor]] = []

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        if self.reason is None:
            try:
                self._observe(operator, args, kwargs, result)
            except Unrecordable as reason:
                self.reason = str(reason)
        return result

    def _observe(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if torch.Tag.dynamic_output_shape in operator.tags and not _indexes_with_integers(operator, args):
            raise Unrecordable(f"its shapes depend on values ({operator})")
        if reads_on_host(operator):
            self.reads.append(Read(self._program(operator, args, kwargs), typed(result)))
            return
        arguments, results = _tensors((args, kwargs)), _tensors(result)
        moved = [tensor for tensor in arguments if tensor.dim() or _copies(operator)]
        # only the first result, because attention also returns its random state, which is on the host
        if any(tensor.device != result.device for tensor in moved for result in results[:1]):
            raise Unrecordable(f"it copies between devices ({operator})")
        self._unknown += [weakref.ref(tensor) for tensor in arguments if self._is_unknown(tensor)]
        storages = {_storage(tensor) for tensor in arguments}
        if operator._schema.is_mutable and operator is not _DETACH:
            written = {_storage(tensor) for tensor in _written(operator, args, kwargs)}
            if not written <= self._made:
                raise Unrecordable(f"it writes in place to a tensor that it did not create ({operator})")
            self._written |= written
        self._made |= {_storage(tensor) for tensor in results} - storages
        fresh = [tensor for tensor in results if id(tensor) not in self._kept]
        if sum(tensor.nbytes for tensor in fresh) > _LARGEST or any(_is_large(tensor) for tensor in fresh):
            self._dropped.update((id(tensor), weakref.ref(tensor)) for tensor in fresh)
        elif fresh:
            self._kept.update((id(tensor), (tensor, len(self._log))) for tensor in fresh)
            self._log.append((operator, args, kwargs, results))

    def finish(self) -> None:
        """After the forward has ended, release its stored results, and check for tensors created from host values.

        A small tensor on the device that no operator returned, and that no longer exists, was created from host values,
        for example by `torch.tensor(0.0, device="cuda")`. PyTorch's copy of such values can't be observed or recorded.
        """
        self._kept.clear()
        self._log.clear()
        if self.reason is None and any(tensor() is None for tensor in self._unknown):
            self.reason = "it creates a tensor on the device from values on the host"

    def _is_unknown(self, tensor: Tensor) -> bool:
        number = id(tensor)
        if tensor.numel() > _CONSTANT:
            # A tensor of this size is more likely the result of a kernel that PyTorch does not dispatch.
            return False
        if tensor.device.type == "cpu" or number in self._inputs or number in self._weights or number in self._kept:
            return False
        dropped = self._dropped.get(number)
        return dropped is None or dropped() is not tensor

    def _program(self, operator: Any, args: Any, kwargs: Any) -> Program:
        """Return the program for the value that this operator returns. Raises `Unrecordable` if there is none."""
        places = dict(self._inputs)
        constants: list[Tensor] = []
        needed: set[int] = set()
        waiting = _tensors((args, kwargs))
        seen: set[int] = set()
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if _storage(tensor) in self._written:
                raise Unrecordable("it reads a value on the host that it has written in place")
            if id(tensor) in self._inputs:
                continue
            kept = self._kept.get(id(tensor))
            if kept is not None:
                needed.add(kept[1])
                waiting += _tensors(self._log[kept[1]][1:3])
            elif (dropped := self._dropped.get(id(tensor))) is not None and dropped() is tensor:
                raise Unrecordable("it reads a value on the host that it has computed")
            else:
                places[id(tensor)] = len(self._inputs) + len(constants)
                constants.append(tensor)
        if len(needed) > _LONGEST:
            raise Unrecordable("it reads a value on the host that it has computed")
        following = len(self._inputs) + len(constants)
        steps = []
        for number in sorted(needed):
            producer, positional, named, results = self._log[number]
            steps.append(_Step(producer, _filler(positional, places), _filler(named, places), len(results)))
            places.update((id(tensor), following + index) for index, tensor in enumerate(results))
            following += len(results)
        last = _Step(operator, _filler(args, places), _filler(kwargs, places), 0)
        return Program(tuple(constants), tuple(steps), last)


class StoredValues(_BasicOperators):
    """Returns the given values, in order, when a forward reads a value on the host."""

    def __init__(self, values: Iterable[tuple[type, Value]]) -> None:
        super().__init__()
        self._values = [value for _, value in values]

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not reads_on_host(operator):
            return operator(*args, **kwargs)
        if not self._values:
            raise Unrecordable("it reads more values on the host than before")
        return self._values.pop(0)

    def finish(self) -> None:
        """Raise `Unrecordable` if the forward has not read every value."""
        if self._values:
            raise Unrecordable("it reads fewer values on the host than before")


def reads_on_host(operator: Any) -> bool:
    """Return whether an operator returns a value instead of a tensor, so that the host waits for the device."""
    return torch.Tag.data_dependent_output in operator.tags and all(
        str(returned.type) in ("bool", "int", "float", "Scalar", "number") for returned in operator._schema.returns
    )


def _indexes_with_integers(operator: Any, args: Any) -> bool:
    """Return whether an operator indexes with integers and not with a mask, so that shapes do not depend on values."""
    masks = (torch.bool, torch.uint8)
    return str(operator._schema.name) == "aten::index" and all(index.dtype not in masks for index in _tensors(args[1]))


def _copies(operator: Any) -> bool:
    return str(operator._schema.name) in ("aten::_to_copy", "aten::copy_")


def _is_large(tensor: Tensor) -> bool:
    """Return whether a tensor is probably an activation, not a mask or indices. Its operator is then not stored."""
    return tensor.dtype not in (torch.bool, torch.int64) and tensor.nbytes > 2**20


def _storage(tensor: Tensor) -> int:
    pointer: int = tensor.untyped_storage()._cdata
    return pointer


def _written(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments to which an operator writes."""
    written = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return written


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


def _filler(value: Any, places: Mapping[int, int]) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that takes the tensors of all places and returns these arguments filled with them."""
    if isinstance(value, Tensor):
        return itemgetter(places[id(value)])
    if not _tensors(value):
        return lambda tensors: value
    if isinstance(value, dict):
        named = {name: _filler(item, places) for name, item in value.items()}
        return lambda tensors: {name: item(tensors) for name, item in named.items()}
    items, kind = [_filler(item, places) for item in value], type(value)
    return lambda tensors: kind([item(tensors) for item in items])
