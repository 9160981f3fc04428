"""hf-rocm bench ops: check and time all implementations of an operation that this machine supports, on the same inputs.

PyTorch's own GEMM and attention are also timed with every library or backend that PyTorch can use.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import describe
from hf_rocm.errors import OptionError
from hf_rocm.ops import blas_backend
from hf_rocm.ops.registry import Choice, Implementation, Operation, operations
from hf_rocm.tools.bench.clock import device_time
from hf_rocm.tools.bench.measure import Progress
from hf_rocm.tools.bench.ops_cases import OpCase
from hf_rocm.tools.bench.parity import compare
from hf_rocm.tools.bench.rates import LARGE, Rates

# The largest number of input sets, which alternate so that large inputs are not cached.
SETS = 16


class Line(NamedTuple):
    """One implementation of one case. share: its fraction of the roofline rate. reason: why it was not timed."""

    operation: str
    case: str
    implementation: str
    microseconds: float | None
    floor: float
    share: float | None
    bound: str
    reason: str | None = None


class _Candidate(NamedTuple):
    name: str
    implementation: Implementation[Any]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


@torch.inference_mode()
def compare_all(cases: Sequence[OpCase], rates: Rates, device: torch.device, progress: Progress) -> Iterator[Line]:
    """Time every candidate in every case, and yield a line for each. A line without a time contains the reason."""
    for case in cases:
        progress(f"{case.operation}: {case.title}")
        operation = operations()[case.operation]
        generator = torch.Generator(device).manual_seed(0)
        inputs = case.inputs(generator)
        key = _key(operation, case, inputs)
        oracle = _oracle(case, inputs)
        for candidate in _candidates(operation):
            yield _line(case, candidate, operation, key, inputs, oracle, rates, generator)
        operation.forget()


def _line(
    case: OpCase,
    candidate: _Candidate,
    operation: Operation[Any],
    key: tuple[Any, ...],
    inputs: tuple[Tensor, ...],
    oracle: tuple[list[Tensor], list[Tensor]] | None,
    rates: Rates,
    generator: torch.Generator,
) -> Line:
    device = inputs[0].device
    spec = operation.spec_type(*key)
    floor = max(case.bytes / rates.copy, case.flops / rates.matmul)
    bound = "memory" if case.bytes / rates.copy >= case.flops / rates.matmul else "compute"
    reason = candidate.implementation.refuses(spec, describe(device))
    if oracle is None:
        reason = reason or "not checked: the reference in fp64 needs more memory than is available; use smaller sizes"
    elif reason is None:
        operation.keep(Choice(spec, candidate.implementation, ()))
        try:
            with candidate.within():
                reason = _wrong(_outputs(case.call(*inputs)), *oracle)
                if reason is None:
                    sets = [inputs, *(case.inputs(generator) for _ in range(_sets(case, device) - 1))]
                    calls = [lambda arguments=arguments: case.call(*arguments) for arguments in sets]
                    seconds = statistics.median(device_time(calls, device))
                    name = f"{candidate.implementation.tier}: {candidate.name}"
                    return Line(
                        case.operation, case.title, name, 1e6 * seconds, 1e6 * floor, floor / seconds, bound, None
                    )
        except Exception as error:  # noqa: BLE001 (backends raise different exceptions for a call that they do not support)
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:160]}"
    name = f"{candidate.implementation.tier}: {candidate.name}"
    return Line(case.operation, case.title, name, None, 1e6 * floor, None, bound, reason)


def _key(operation: Operation[Any], case: OpCase, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the specification that the router builds for this call."""
    operation.forget()
    case.call(*inputs)
    try:
        (key,) = operation.choices
    except ValueError:
        raise OptionError(f"{case.operation} was never routed for {case.title}") from None
    return key


def _oracle(case: OpCase, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return the outputs of the eager tier in the inputs' dtype and in fp64, or None if they don't fit into memory."""
    try:
        wide = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
        with options.override(tier="eager"):
            return _outputs(case.call(*inputs)), _outputs(case.call(*wide))
    except torch.OutOfMemoryError:
        return None


def _wrong(actual: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> str | None:
    for output, eager_output, exact_output in zip(actual, eager, exact, strict=True):
        reason = compare(output, eager_output, exact_output).refusal
        if reason is not None:
            return reason
    return None


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _candidates(operation: Operation[Any]) -> Iterator[_Candidate]:
    for implementation in operation.implementations:
        variants = list(_variants(operation.name)) if implementation.tier == "torch" else []
        yield _Candidate(implementation.name, implementation)
        for name, within in variants:
            yield _Candidate(f"{implementation.name}, {name}", implementation, within)


def _variants(operation: str) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Yield the BLAS libraries that PyTorch can use for `linear`, or all backends of its attention."""
    if operation == "linear":
        for name in blas_backend.LIBRARIES:
            try:
                blas_backend.check(name)
            except OptionError:
                continue
            yield name, lambda name=name: blas_backend.prefer(name)  # type: ignore[misc]
    if operation in ("attention", "decode_attention"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        for backend in SDPBackend.__members__.values():
            if backend.name not in ("ERROR", "OVERRIDEABLE"):
                yield backend.name.lower(), lambda backend=backend: sdpa_kernel(backend)  # type: ignore[misc]


def _sets(case: OpCase, device: torch.device) -> int:
    """Return the number of input sets that together exceed all caches, but at least 2 and at most `SETS`.

    On a CPU, returns 2. Tiny inputs remain cached, as they do in a model.
    """
    if device.type != "cuda":
        return 2
    return int(min(SETS, max(2, LARGE // max(case.bytes, 1) + 1)))
