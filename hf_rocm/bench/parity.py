"""No speed on wrong numbers: every side is compared with an exact reference before anything is timed.

The tolerance is derived, not chosen: a side may be at most twice as wrong as plain eager attention in the model's own
dtype, plus one rounding step of the largest value. The reference is that eager model with its weights widened to fp32
(fp64 for fp32 models), one module at a time, so that no second copy of the weights is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_rocm.bench import inputs
from hf_rocm.bench.cases import Case
from hf_rocm.bench.generating import generate_logits
from hf_rocm.bench.sides import Side, twin

TOKENS = 32768  # of a whole batch at most, which keeps the reference within seconds
JUDGED = 16  # of the new tokens: the first few of a recorded step run uncaptured


class Parity(NamedTuple):
    """How wrong a side is, how wrong it may be, and how wrong the eager run is; absolute, of logits or states."""

    error: float
    allowed: float
    eager: float

    @property
    def refusal(self) -> str | None:
        """Why nothing is timed, in a sentence, or None."""
        if self.error <= self.allowed:  # nan isn't
            return None
        return f"its numbers are wrong by {self.error:.3g}, and {self.allowed:.3g} is allowed"


class Trial(NamedTuple):
    """What a side gave, and what the reference has to be fed for the same. same: this was the very case to be timed.
    tokens: those that it chose, [B, S + new] (of a forward, the next one)."""

    arguments: dict[str, Any]
    actual: Tensor
    same: bool
    tokens: Tensor


def trial(side: Side, case: Case, *, most: int | None = None) -> Trial:
    """Run one side on inputs like the case's: the very same, unless a reference for them would be too large.

    most: the longest prompt; by default what the memory allows.
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
    """The eager model and the exact one, twins of the model that is measured."""

    def __init__(self, model: Any) -> None:
        self._eager = _plainly(twin(model))
        self._exact = _plainly(twin(model))
        self._last: tuple[Any, Tensor, Tensor] | None = None

    def judge(self, trial: Trial) -> Parity:
        """How wrong what a side gave is."""
        return compare(trial.actual, *self._run(trial.arguments))

    def _run(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The eager and the exact output; sides that were fed the same share them."""
        fed = next(iter(arguments.values()))
        if self._last is None or self._last[0].shape != fed.shape or not torch.equal(self._last[0], fed):
            with torch.no_grad():
                eager = inputs.output(self._eager(**arguments)).clone()
                with widened(self._exact) as wide:
                    exact = inputs.output(self._exact(**_in(arguments, wide))).clone()
            self._last = (fed, eager, exact)
        return self._last[1], self._last[2]


class ReferenceInPlace(Reference):
    """The same where copies can't be had: a sharded model's own modules are bound to it. It is itself for that time."""

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
    """The largest errors against `exact`; eager has the dtype whose rounding step is granted."""
    eager_error = _largest(eager, exact)
    step = torch.finfo(eager.dtype).eps * exact.abs().max().item()
    return Parity(_largest(actual, exact), 2 * eager_error + step, eager_error)


@contextmanager
def widened(model: nn.Module) -> Iterator[torch.dtype]:
    """Run a model as if its weights were in the next wider dtype, which each module gets for the time of its call."""
    wide = torch.float64 if next(model.parameters()).dtype == torch.float32 else torch.float32
    kept: dict[int, dict[str, Any]] = {}

    def widen(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        for owner in _owners(module):
            kept[id(owner)] = dict(owner._parameters)
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    owner._parameters[name] = nn.Parameter(parameter.to(wide), requires_grad=False)
        # a caller that looks at the weight's dtype saw the narrow one
        return tuple(_in(dict(enumerate(arguments)), wide).values())

    def narrow(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        for owner in _owners(module):
            owner._parameters.update(kept.pop(id(owner), {}))

    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [each.register_forward_pre_hook(widen) for each in owners]
    handles += [each.register_forward_hook(narrow, always_call=True) for each in owners]
    try:
        yield wide
    finally:
        for handle in handles:
            handle.remove()


def _largest(actual: Tensor, exact: Tensor) -> float:
    """The largest difference, row by row, since a whole batch of logits in fp64 can be larger than the weights."""
    return max((one.double() - other.double()).abs().max().item() for one, other in zip(actual, exact, strict=True))


def _length(model: Any, case: Case) -> int:
    """The prompt's, as far as the scores of eager attention fit into the memory."""
    if not case.prompt:
        return 0  # an image has its own
    most = 2**24
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        most = free // (3 * _BYTES_A_PAIR * getattr(model.config, "num_attention_heads", 32))
    return max(1, min(case.prompt, TOKENS // case.batch, int((most / case.batch) ** 0.5)))


# Of a query and a key that see each other, in the reference: scores, their softmax and its narrower copies.
_BYTES_A_PAIR = 16


def _owners(module: nn.Module) -> list[nn.Module]:
    """Whose parameters a call of this module reads: its own, and in PyTorch's own attention its projections' too."""
    return list(module.modules()) if isinstance(module, nn.MultiheadAttention) else [module]


def _in(arguments: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    return {
        name: each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each
        for name, each in arguments.items()
    }


def _plainly(model: Any) -> Any:
    """Have every module of a model run eager attention and eager experts: its configs are its own."""
    for config, name in _implementations(model):
        setattr(config, name, "eager")
    return model


def _implementations(model: Any) -> list[tuple[Any, str]]:
    """What says, in each config of a model, which attention and which experts run."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    names = ("_attn_implementation", "_experts_implementation")
    return [(config, name) for config in configs.values() for name in names if hasattr(config, name)]
