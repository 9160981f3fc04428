"""Compare every side with an exact reference before anything is timed.

The tolerance is derived: the error of a side may be at most twice that of the eager model in the same dtype, plus one
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

TOKENS = 32768  # the largest number over the whole batch, so that the reference takes seconds
JUDGED = 16  # new tokens that are compared; the first few of a recorded step run uncaptured


class Parity(NamedTuple):
    """The absolute errors of logits or states: of a side, the allowed one, and that of the eager run."""

    error: float
    allowed: float
    eager: float

    @property
    def refusal(self) -> str | None:
        """The reason why nothing is timed, or None."""
        if self.error <= self.allowed:  # False for NaN
            return None
        return f"its numbers are wrong by {self.error:.3g}, and at most {self.allowed:.3g} is allowed"


class Trial(NamedTuple):
    """The output of one side, and the arguments for the reference. same: whether this is the timed case itself.
    tokens: the chosen tokens, [B, S + new] (for a forward, the next one)."""

    arguments: dict[str, Any]
    actual: Tensor
    same: bool
    tokens: Tensor


def trial(side: Side, case: Case, *, most: int | None = None) -> Trial:
    """Run one side on inputs like the case's: identical inputs, unless the reference would not fit in memory.

    most: the longest prompt; by default the longest that fits into memory.
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
    """The eager model and the exact one, copies of the measured model."""

    def __init__(self, model: Any) -> None:
        self._eager = _plainly(twin(model))
        self._exact = _plainly(twin(model))
        self._last: tuple[Any, Tensor, Tensor] | None = None

    def judge(self, trial: Trial) -> Parity:
        """Return the error of a side's output."""
        return compare(trial.actual, *self._run(trial.arguments))

    def _run(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The eager and the exact output; sides with equal inputs share them."""
        fed = next(iter(arguments.values()))
        if self._last is None or self._last[0].shape != fed.shape or not torch.equal(self._last[0], fed):
            with torch.no_grad():
                eager = inputs.output(self._eager(**arguments)).clone()
                with widened(self._exact) as wide:
                    exact = inputs.output(self._exact(**_in(arguments, wide))).clone()
            self._last = (fed, eager, exact)
        return self._last[1], self._last[2]


class ReferenceInPlace(Reference):
    """A reference for models that cannot be copied, since sharded modules are bound to their model: the model itself is
    used."""

    def __init__(self, model: Any) -> None:
        self._eager = self._exact = model
        self._last = None

    def _run(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        before = [(config, name, getattr(config, name)) for config, name in _implementations(self._eager)]
        _plainly(self._eager)
        try:
            return super()._run(arguments)
        finally:
            for config, name, value in before:
                setattr(config, name, value)


def compare(actual: Tensor, eager: Tensor, exact: Tensor) -> Parity:
    """The largest errors against `exact`; the allowed rounding step is that of eager's dtype."""
    eager_error = _largest(eager, exact)
    allowed = allowed_error(eager_error, eager.dtype, exact.abs().max().item())
    return Parity(_largest(actual, exact), allowed, eager_error)


@contextmanager
def widened(model: nn.Module) -> Iterator[torch.dtype]:
    """Run a model with weights in the next wider dtype: each module's are converted for the time of its call."""
    wide = torch.float64 if next(model.parameters()).dtype == torch.float32 else torch.float32
    kept: dict[int, dict[str, Any]] = {}

    def widen(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        for owner in _owners(module):
            kept[id(owner)] = dict(owner._parameters)
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    owner._parameters[name] = nn.Parameter(parameter.to(wide), requires_grad=False)
        # a caller that read the weight's dtype saw the narrow one
        return tuple(_in(dict(enumerate(arguments)), wide).values())

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
    """The largest difference, computed by row, since a batch of logits in fp64 can be larger than the weights."""
    return max((one.double() - other.double()).abs().max().item() for one, other in zip(actual, exact, strict=True))


def _length(model: Any, case: Case) -> int:
    """The prompt length, limited so that the scores of eager attention fit into memory."""
    if not case.prompt:
        return 0  # images have no prompt
    most = 2**24
    if model.device.type == "cuda":
        most = free_memory(model.device) // (3 * _BYTES_A_PAIR * getattr(model.config, "num_attention_heads", 32))
    return max(1, min(case.prompt, TOKENS // case.batch, int((most / case.batch) ** 0.5)))


# Bytes for a visible pair of query and key in the reference: scores, their softmax and its narrower copies.
_BYTES_A_PAIR = 16


def _owners(module: nn.Module) -> list[nn.Module]:
    """The modules whose parameters a call reads: the module itself, and the projections in PyTorch's attention."""
    return list(module.modules()) if isinstance(module, nn.MultiheadAttention) else [module]


def _in(arguments: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def _plainly(model: Any) -> Any:
    """Select eager attention and experts in every config of the model, which are its own."""
    for config, name in _implementations(model):
        setattr(config, name, "eager")
    return model


def _implementations(model: Any) -> list[tuple[Any, str]]:
    """The config fields that select attention and experts."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    names = ("_attn_implementation", "_experts_implementation")
    return [(config, name) for config in configs.values() for name in names if hasattr(config, name)]
