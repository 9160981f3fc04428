"""Verify a recorded step: replay it, run it uncaptured from the same state, and compare the two.

Keys and values that earlier replays wrote are in the cache, and both runs would read them even if they were wrong. So
the uncaptured run first recomputes the keys and values of the previous steps from their tokens. A replay must not
change any rows of the cache other than those of its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.inputs import residents_of
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.recorded_step import RecordedStep, digest, largest, tensors_of
from hf_rocm.generation.residents import Residents
from hf_rocm.generation.schedule import BACK
from hf_rocm.generation.step import Inputs
from hf_rocm.ops.bits import bits
from hf_rocm.ops.captured import as_captured
from hf_rocm.weights.shuffled_copy import counters_watched

# The largest allowed difference between two runs of the same kernels, which may sum in a different order, in units of
# the rounding step of the largest value.
ROUNDINGS = 16

# The largest number of uncaptured runs with which a replay is compared if the runs differ from one another.
RUNS = 5


class Comparison(NamedTuple):
    """The result of a comparison.

    outputs: the outputs of the uncaptured step, whose keys and values are in the cache now. agrees: whether the replay
    agrees and is intact on every rank. agrees_here: whether it agrees on this rank. intact: whether the replay changed
    only the cache rows of its own tokens, on every rank. difference: the largest absolute difference. finite: whether
    all outputs of the uncaptured steps are finite, on every rank; True if this was not checked. operators: the number
    of operators that the step runs; 0 if they were not counted.
    """

    outputs: Any
    agrees: bool
    agrees_here: bool
    intact: bool
    difference: float
    finite: bool
    operators: int


def reach(cache: DecodeCache, arguments: Mapping[str, Any]) -> int:
    """The number of previous steps that can be recomputed.

    It is the smallest of `DecodeCache.steady`, the number of steps since user code last changed tokens in place, and
    the number of earlier tokens. It is 0 if the arguments are not the resident inputs, or if those have no tokens.
    """
    residents = _residents(cache, arguments)
    if residents is None or residents.tokens is None:
        return 0
    return min(cache.steady, residents.unedited, residents.tokens.shape[1] - 1)


def compare(
    step: RecordedStep,
    model: Any,
    arguments: Mapping[str, Any],
    inputs: Inputs,
    *,
    cache: DecodeCache,
    back: int,
    ranks: Agreement,
    check_finite: bool,
) -> Comparison:
    """Replay the next step, run it uncaptured after the `back` steps before it, and compare the outputs and the cache.

    The results must be bitwise equal; the outputs of the previous steps are compared by their digests. If the step is
    not deterministic, `agree` defines the rule, and no digests are compared.
    """
    cache.keep_states()
    before = cache.digest(0)
    step.replay(inputs.tensors)
    cache.advance()
    intact = ranks.all(torch.equal(before, cache.digest(cache.tokens)))
    replayed = [tensor.clone() for tensor in step.tensors] + cache.written(back + cache.tokens)
    runs: list[list[Tensor]] = []
    operators, agrees, difference = 0, False, 0.0
    for number in range(RUNS):
        cache.rewind()
        # Operators are counted only after a difference.
        with Operators() if number else nullcontext() as counted:
            returned = _run(model, arguments, cache, back)
        outputs, digests = returned.outputs, returned.digests
        operators = 0 if counted is None else counted.count // (back + 1)
        runs.append([tensor.clone() for tensor in tensors_of(outputs)] + cache.written(back + cache.tokens))
        agrees, difference, noise = agree(replayed, runs)
        if agrees:
            agrees = step.tokens_agree() if noise else torch.equal(step.digests[-len(digests) :], digests)
        if ranks.all(agrees) or (number and ranks.all(not noise)):
            break
    cache.drop_states()
    finite = not check_finite or ranks.all(bool(returned.finite))
    return Comparison(outputs, ranks.all(agrees and intact), agrees, intact, difference, finite, operators)


class _Uncaptured(NamedTuple):
    """The results of uncaptured steps.

    outputs: those of the last step. digests: of the outputs of up to `BACK` + 1 steps, the last step included. finite:
    whether the outputs of all steps are finite.
    """

    outputs: Any
    digests: Tensor
    finite: Tensor


def _run(model: Any, arguments: Mapping[str, Any], cache: DecodeCache, back: int) -> _Uncaptured:
    """Recompute the `back` previous steps, then run the next step, all uncaptured."""
    residents = _residents(cache, arguments)
    digests: list[Tensor] = []
    finite: list[Tensor] = []

    def run() -> Any:
        cache.aim(cache.tokens)
        # Run the same kernels as the recording.
        with as_captured(), counters_watched():
            outputs = model(**arguments)
        tensors = tensors_of(outputs)
        digests.append(digest(tensors, largest(outputs)))
        finite.extend(tensor.isfinite().all() for tensor in tensors)
        return outputs

    if back and residents is not None and residents.tokens is not None:
        tokens = residents.tokens
        cache.back(back)
        position = (residents.position or 0) - back
        residents.write(position)
        for column in range(-1 - back, -1):
            residents.input_ids.copy_(tokens[:, column : column + 1])
            run()
            position += 1
            residents.write(position)
        residents.input_ids.copy_(tokens[:, -1:])
    outputs = run()
    return _Uncaptured(outputs, torch.cat(digests[-1 - BACK :]), torch.stack(finite).all())


def _residents(cache: DecodeCache, arguments: Mapping[str, Any]) -> Residents | None:
    residents = residents_of(cache)
    return residents if residents is not None and arguments.get("input_ids") is residents.input_ids else None


def agree(replayed: list[Tensor], runs: list[list[Tensor]]) -> tuple[bool, float, bool]:
    """Return (whether a replay agrees with the uncaptured runs, its difference from the last run, whether runs differ).

    If the replay equals the last run, the earlier runs are not compared, and the third value is False.
    The same kernels give bitwise equal results unless their order of summation changes. If it does, a tensor may differ
    by at most twice the largest difference between an earlier run and the last one. If the runs themselves differ by
    more than rounding, or if there is only one, a replay that differs can't be checked, and the result is False.
    """
    last = runs[-1]
    if _equal(replayed, last):
        return True, 0.0, False
    worst, agree, noisy = 0.0, len(runs) > 1, False
    for index, (one, two) in enumerate(zip(replayed, last, strict=True)):
        distance = _distance(one, two)
        noise = max((_distance(run[index], two) for run in runs[:-1]), default=0.0)
        eps = torch.finfo(two.dtype).eps if two.is_floating_point() else 0.0
        rounding = ROUNDINGS * eps * float(two.float().abs().max())
        # Comparisons with NaN are False, and so is `agree`.
        agree = agree and distance <= 2 * noise and noise <= rounding
        worst = worst if distance <= worst or math.isnan(worst) else distance
        noisy = noisy or noise != 0
    return agree, worst, noisy


def _distance(one: Tensor, two: Tensor) -> float:
    return float((two.float() - one.float()).abs().max())


def _equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether all tensors are bitwise equal, including NaN. The host waits for the device once."""
    same = [(bits(one) == bits(other)).all() for one, other in zip(ones, others, strict=True)]
    return bool(torch.stack(same).all())


class Operators(TorchDispatchMode):
    """Count the operators within the block, except views. Their number is roughly that of the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            # DTensor calls the operators on its local tensors, and those calls are counted.
            return NotImplemented
        self.count += not operator.is_view
        return operator(*args, **(kwargs or {}))
