"""Routing of mixtures, recorded from stock and replayed elsewhere.

A rounding may turn a tie and send a token to another expert, with another output altogether. So the scores that are
chosen from are compared on their own, and everything after them is computed for the choice that stock made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.coverage.case import Case

_TOP = (torch.topk, torch.Tensor.topk)
_LARGEST = (torch.max, torch.Tensor.max)


class Choices(TorchFunctionMode):
    """Records every choice of largest entries, or makes the ones that were recorded. scores: what it was made from."""

    def __init__(self, made: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        self.told = None if made is None else list(made)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        scores = args[0] if args else None
        largest = function in _LARGEST and isinstance(result, tuple) and scores.ndim < 4  # else it is attention's
        if function not in _TOP and not largest:
            return result
        self.scores.append(scores.detach().nan_to_num(neginf=0.0))  # what is out of the question says nothing
        ids = result[1]
        if self.told is not None:
            ids = self.told.pop(0)
            assert ids.shape == result[1].shape, "another choice than stock makes at this point"
        self.made.append(ids)
        dim = (kwargs or {}).get("dim", -1)
        if ids.ndim == scores.ndim:
            return type(result)((scores.gather(dim, ids), ids))
        return type(result)((scores.gather(dim, ids.unsqueeze(dim)).squeeze(dim), ids))


@contextmanager
def choosing(case: Case, like: Choices | None = None) -> Iterator[Choices]:
    """Record the choices of a mixture; like: the ones to make, all of which must be asked for."""
    choices = Choices(None if like is None else like.made)
    if not case.routes():
        yield choices
        return
    with choices:
        yield choices
    assert not choices.told, "stock makes choices that weren't asked for here"


def route_in_float64(model: Any) -> None:
    """Have the routers of a mixture take and give float64: some ask for float32, which meets float64 nowhere.

    The logits that come first of three are only reported, and one model keeps them in a float32 tensor of its own.
    """

    def widen(tensors: Any) -> Any:
        return tuple(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in tensors)

    def widen_result(module: Any, inputs: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return output.double()
        return (*output[:1], *widen(output[1:])) if len(output) == 3 else widen(output)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("gate", "router", "wg"):
            module.register_forward_pre_hook(lambda _, inputs: widen(inputs))
            module.register_forward_hook(widen_result)
