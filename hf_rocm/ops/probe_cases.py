"""Check an implementation on small calls, with a tolerance derived from the error of the eager tier.

The calls themselves are defined with their operations: see `Operation.cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.registry import Case, operations
from hf_rocm.tolerance import allowed_error

# An odd length, longer than one tile of 32.
LENGTH = 37
# Above 128 queries, aiter prefers its assembly kernels.
LONG = 160
WINDOW = 5
# In elements. Larger weights are checked with fewer rows.
LARGEST_WEIGHT = 2**25


def kind(operation: str, spec: Any) -> tuple[Any, ...]:
    """The fields of the specification that represents this kind of call; see `Operation`."""
    return tuple(operations()[operation].kind(spec))


def check(operation: str, tier: str, name: str, values: tuple[Any, ...]) -> str | None:
    """Run the implementation on every case of this kind. Returns the problem, in a sentence, or None."""
    known = operations()[operation]
    call = next(
        candidate.call for candidate in known.implementations if (candidate.tier, candidate.name) == (tier, name)
    )
    eager = next(candidate.call for candidate in known.implementations if candidate.tier == "eager")
    if known.terms is not None:
        call, eager = from_arguments(call, known.terms), from_arguments(eager, known.terms)
    spec = known.spec_type(*values)
    with torch.inference_mode(False), torch.set_grad_enabled(bool(spec.grad)):
        for case in known.cases(spec):
            try:
                actual = _run(call, case, torch.Tensor.clone, spec)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - kernels may raise anything, failed builds exit
                lines = str(error).strip().splitlines() or ["no message"]
                return f"it raised {type(error).__name__}: {lines[0]}"
            expected = _run(eager, case, torch.Tensor.double, spec)
            measure = _run(eager, case, torch.Tensor.clone, spec)
            for output, reference, exact in zip(actual, measure, expected, strict=True):
                reason = disagreement(output, reference, exact)
                if reason is not None:
                    return reason
    return None


def disagreement(actual: Tensor, eager: Tensor, expected: Tensor) -> str | None:
    """Why `actual` is wrong, or None.

    Its error may be up to twice that of `eager` in the same dtype, plus one rounding step.
    expected: the result in fp64.
    """
    if actual.shape != expected.shape:
        return f"its output is {list(actual.shape)}, not {list(expected.shape)}"
    if not expected.numel():
        # This kind of call does not have this output.
        return None
    if not expected.is_floating_point():
        return None if torch.equal(actual, expected) else "its integers are wrong"
    if not torch.isfinite(actual).all():
        return "its output is not finite"
    eager_error = (eager.double() - expected).abs().max().item()
    allowed = allowed_error(eager_error, eager.dtype, expected.abs().max().item())
    error = (actual.double() - expected).abs().max().item()
    if error > allowed:
        return f"its output is wrong by {error:.3g}, but only {allowed:.3g} is allowed"
    return None


def _run(function: Callable[..., Any], case: Case, convert: Callable[[Tensor], Tensor], spec: Any) -> list[Tensor]:
    """The outputs, and the gradients of the inputs if spec.grad.

    convert: applied to floating-point inputs before the call; other tensors are copied.
    """
    tensors = [_converted(tensor, convert) for tensor in case.tensors]
    keywords = {key: _converted(value, convert) for key, value in case.keywords.items()}
    if spec.grad:
        for tensor in tensors:
            if tensor is not None and tensor.is_floating_point():
                tensor.requires_grad_()
    result = function(*tensors, *case.others, **keywords)
    # For attention, only the eager tier returns weights.
    if spec is not None and hasattr(spec, "weights"):
        result = result[0]
    outputs = list(result) if isinstance(result, tuple) else [result]
    if not spec.grad:
        return outputs
    inputs = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    ramps = [torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device) for out in outputs]
    total = sum((output * ramp).sum() for output, ramp in zip(outputs, ramps, strict=True))
    assert isinstance(total, Tensor)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(total, inputs)]


def _converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Floating-point tensors are converted and detached, other tensors copied, and other values returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    detached = value.detach()
    converted = convert(detached) if value.is_floating_point() else detached
    # `double` returns an fp64 tensor itself.
    return converted.clone() if converted is detached else converted


class Draw:
    """Draws normally distributed numbers on the CPU from a fixed seed, without changing the user's random state."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(device=self.device, dtype=self.dtype)


def from_arguments(call: Callable[..., Any], terms: type[tuple[Any, ...]]) -> Callable[..., Any]:
    """Wrap an implementation that takes one NamedTuple in a function that takes its fields as separate arguments."""
    return lambda *arguments: call(terms(*arguments))


def smaller(size: int, most: int, power: int = 64) -> int:
    """A size up to about `most` with the same remainder modulo `power` as `size`. most: a multiple of `power`."""
    return size if size <= most else most + size % power


def fewer_rows(n: int, k: int, step: int = 64) -> int:
    """N of a weight [N, K] with up to about `LARGEST_WEIGHT` elements, with the same remainder modulo `step` as n."""
    return n if n * k <= LARGEST_WEIGHT else max(step, LARGEST_WEIGHT // k // step * step) + n % step


def small_window(spec: Any) -> Any:
    """The kind of an attention specification, with a window that is shorter than the sequences of the cases."""
    return spec if spec.window is None else spec._replace(window=min(spec.window, WINDOW))
