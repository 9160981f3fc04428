"""Expert routing, recorded from stock and replayed in other models.

Rounding may break a tie differently and select another expert, with an entirely different output. So the scores are
compared separately, and everything after them is computed with stock's selection.
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
    """Record every selection of experts, or replay recorded ones. scores: the scores of each selection."""

    def __init__(self, replay: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.selections: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        self.stock_choices = None if replay is None else list(replay)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        scores = args[0] if args else None
        # a maximum over a tensor of four dims belongs to attention
        largest = function in _LARGEST and isinstance(result, tuple) and scores.ndim < 4
        if function not in _TOP and not largest:
            return result
        # Excluded experts have scores of -inf, whose difference would be NaN.
        self.scores.append(scores.detach().nan_to_num(neginf=0.0))
        ids = result[1]
        if self.stock_choices is not None:
            ids = self.stock_choices.pop(0)
            assert ids.shape == result[1].shape, "the shape of the selection differs from stock's"
        self.selections.append(ids)
        dim = (kwargs or {}).get("dim", -1)
        if ids.ndim == scores.ndim:
            return type(result)((scores.gather(dim, ids), ids))
        return type(result)((scores.gather(dim, ids.unsqueeze(dim)).squeeze(dim), ids))


@contextmanager
def choosing(case: Case, replay: Choices | None = None) -> Iterator[Choices]:
    """Record the selections of a model. replay: recorded selections to replay, all of which must be used."""
    choices = Choices(None if replay is None else replay.selections)
    if not case.has_routed_experts():
        yield choices
        return
    with choices:
        yield choices
    assert not choices.stock_choices, "some of stock's selections were not used"


def route_in_float64(model: Any) -> None:
    """Make the routers of a model use float64: some convert to float32, which can't be combined with float64.

    If a router returns three results, the first one, the logits, is not converted. It is only reported, and one model
    keeps it in a separate float32 tensor.
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
