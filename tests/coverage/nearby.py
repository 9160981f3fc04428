"""The errors of stock runs with slightly different weights.

The largest error of one run can be small by chance, depending on the CPU. Runs with nearby weights show how large it
usually is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tests.coverage import inputs
from tests.coverage.case import Case
from tests.coverage.routing import choosing, float64_copy

Run = Callable[[nn.Module], dict[str, Tensor]]


def errors_nearby(
    case: Case, stock: nn.Module, run: Run, expected: dict[str, Tensor], *, times: int = 4
) -> Iterator[dict[str, Tensor]]:
    """Yield `expected` plus the errors of stock runs in which every weight differs by about eps.

    The errors are those relative to a float64 run with the same weights. run: returns the named results of a model.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(times):
        model = copy.deepcopy(stock)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.mul_(1 + noise * torch.finfo(parameter.dtype).eps)
        wide = float64_copy(case, model)
        with torch.inference_mode():
            with choosing(case) as choices:
                actual = run(model)
            with inputs.in_float64(), choosing(case, choices):
                exact = run(wide)
        yield {part: value + (actual[part].double() - exact[part]) for part, value in expected.items()}
