"""Compare every side with a more precise reference before anything is timed.

The tolerance is derived: a side may have at most twice the error of the eager model in the same dtype, plus one
rounding step of the largest value. The reference is the eager model with its weights converted to fp32 (fp64 for fp32
models), one module at a time, so that no second copy of the weights is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_rocm.device import free_memory
from hf_rocm.tolerance import allowed_error
from hf_rocm.tools.bench import inputs
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.generating import generate_logits
from hf_rocm.tools.bench.variants import Side, twin

# The largest number of prompt tokens in a batch, so that the reference takes only seconds.
TOKENS = 32768
# The smallest number of values on which the error of eager is measured.
_FEW = 32
# The largest number of new tokens that are compared. They include recorded steps, which follow a few uncaptured ones.
JUDGED = 16


class Parity(NamedTuple):
    """Absolute errors of logits or hidden states: a side's error, the allowed error, and the eager run's error."""

    error: float
    allowed: float
    eager: float

    @property
    def refusal(self) -> str | None:
        """The reason why the side is not timed, or None."""
        # The comparison is false if the error is NaN.
        if self.error <= self.allowed:
            return None
        return f"its results are wrong by {self.error:.3g}, but at most {self.allowed:.3g} is allowed"


class Trial(NamedTuple):
    """The output of one side, and the arguments for the reference. same: whether the inputs are those of the timed
    case. tokens: the whole sequence, [B, S + new]; for a forward pass, the index of the largest value at the last
    position."""

    arguments: dict[str, Any]
    actual: Tensor
    same: bool
    tokens: Tensor


def trial(side: Side, case: Case, *, most: int | None = None) -> Trial:
    """Run one side on the inputs of a case, or on a shorter prompt if the reference would take too much memory or time.

    most: the longest prompt to use; see `_length` for the default.
    """
    length = _length(side.model, case) if most is None else min(case.prompt, most)
    smaller = case._replace(prompt=length)
    with torch.no_grad(), side.turn():
        if case.kind != "decode":
            arguments = inputs.forward_inputs(side.model, smaller)
            states = inputs.output(side(**arguments))
            return Trial(arguments, states, smaller == case, states[..., -1:, :].argmax(-1))
        ids = inputs.tokens(side.model, case.batch, length)
        sequence, actual = generate_logits(side, ids, case.new, judged=JUDGED)
    judged = actual.shape[1]
    arguments = {"input_ids": sequence[:, : length + judged - 1], "logits_to_keep": judged}
    return Trial(arguments, actual, smaller == case, sequence)


class Reference:
    """The eager and the exact model, which are copies of the measured model that share its weights."""

    def __init__(self, model: Any) -> None:
        self._eager = _with_eager(twin(model))
        self._exact = _with_eager(twin(model))
        self._last: tuple[Any, tuple[Tensor, Tensor, float]] | None = None

    def judge(self, trial: Trial) -> Parity:
        """Return the error of a side's output, with the allowed error."""
        eager, exact, error = self._run(trial.arguments)
        return compare(trial.actual, eager, exact, eager_error=error)

    def _run(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
        """Return the eager and the exact output, and eager's error. Sides with equal inputs share them."""
        first_input = next(iter(arguments.values()))
        if (
            self._last is None
            or self._last[0].shape != first_input.shape
            or not torch.equal(self._last[0], first_input)
        ):
            eager, exact = self._outputs(arguments)
            error = _largest(eager, exact)
            # the error of a few numbers, such as two logits of a classifier, can be small by chance
            for shift in range(1, _FEW // exact.numel() + 1):
                shifted = {name: _shifted(value, shift) for name, value in arguments.items()}
                error = max(error, _largest(*self._outputs(shifted)))
            self._last = (first_input, (eager, exact, error))
        return self._last[1]

    def _outputs(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            eager = inputs.output(self._eager(**arguments)).clone()
            with widened(self._exact) as wide:
                return eager, inputs.output(self._exact(**_cast(arguments, wide))).clone()


class ReferenceInPlace(Reference):
    """A reference that uses the model itself. A copy of a sharded model would call the original's layers."""

    def __init__(self, model: Any) -> None:
        self._eager = self._exact = model
        self._last = None

    def _run(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
        before = [(config, name, getattr(config, name)) for config, name in _implementations(self._eager)]
        _with_eager(self._eager)
        try:
            return super()._run(arguments)
        finally:
            for config, name, value in before:
                setattr(config, name, value)


def _shifted(value: Any, by: int) -> Any:
    return value.roll(by, -1) if torch.is_tensor(value) else value


def compare(actual: Tensor, eager: Tensor, exact: Tensor, *, eager_error: float | None = None) -> Parity:
    """Return the largest absolute differences from `exact`. The allowed rounding step is that of eager's dtype.

    eager_error: the error of eager if it is known from more inputs than these.
    """
    eager_error = _largest(eager, exact) if eager_error is None else eager_error
    allowed = allowed_error(eager_error, eager.dtype, exact.abs().max().item())
    return Parity(_largest(actual, exact), allowed, eager_error)


@contextmanager
def widened(model: nn.Module) -> Iterator[torch.dtype]:
    """Within the block, run a model in fp32 (fp64 for an fp32 model), and yield that dtype.

    The weights of each module are converted for the duration of the module's call.
    """
    wide = torch.float64 if next(model.parameters()).dtype == torch.float32 else torch.float32
    kept: dict[int, dict[str, Any]] = {}

    def widen(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        for owner in _owners(module):
            kept[id(owner)] = dict(owner._parameters)
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    owner._parameters[name] = nn.Parameter(parameter.to(wide), requires_grad=False)
        # the caller may have cast these arguments to the weight's dtype, which was still the narrow one
        return tuple(_cast(dict(enumerate(arguments)), wide).values())

    def narrow(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        for owner in _owners(module):
            owner._parameters.update(kept.pop(id(owner), {}))

    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [owner.register_forward_pre_hook(widen) for owner in owners]
    handles += [owner.register_forward_hook(narrow, always_call=True) for owner in owners]
    try:
        yield wide
    finally:
        for handle in handles:
            handle.remove()


def _largest(actual: Tensor, exact: Tensor) -> float:
    """Return the largest difference, computed row by row: a batch of fp64 logits can be larger than the weights."""
    return max((one.double() - other.double()).abs().max().item() for one, other in zip(actual, exact, strict=True))


def _length(model: Any, case: Case) -> int:
    """Return the prompt length, limited by `TOKENS` and by the size of the scores of eager attention.

    On a GPU, the scores must fit in the free memory. On a CPU, a batch may have 2²⁴ pairs of a query and a key.
    """
    if not case.prompt:
        # Images have no prompt.
        return 0
    most = 2**24
    if model.device.type == "cuda":
        most = free_memory(model.device) // (3 * _BYTES_PER_PAIR * getattr(model.config, "num_attention_heads", 32))
    return max(1, min(case.prompt, TOKENS // case.batch, int((most / case.batch) ** 0.5)))


# Bytes per head and per pair of a query and a key in the reference: the scores, their softmax and its narrower copies.
_BYTES_PER_PAIR = 16


def _owners(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters a call reads: the module, and the projections in PyTorch's attention."""
    return list(module.modules()) if isinstance(module, nn.MultiheadAttention) else [module]


def _cast(arguments: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def _with_eager(model: Any) -> Any:
    """Select eager attention and experts in all configs of the model. No other model may share these configs."""
    for config, name in _implementations(model):
        setattr(config, name, "eager")
    return model


def _implementations(model: Any) -> list[tuple[Any, str]]:
    """Return the config fields that select the implementations of attention and experts."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    names = ("_attn_implementation", "_experts_implementation")
    return [(config, name) for config in configs.values() for name in names if hasattr(config, name)]
