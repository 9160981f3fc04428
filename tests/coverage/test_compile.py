"""Under torch.compile each model is one graph with ours in it, wherever stock's is one."""

from __future__ import annotations

import pytest
import torch

from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES


@pytest.mark.slow
@params(CASES, without="compile")
def test_one_graph(case, trio):
    ours, stock, _ = trio()
    given = inputs.arguments(case, ours)
    with torch.inference_mode():
        try:
            actual = in_one_graph(ours, given)
        except Exception:
            skip_unless_it_compiles(stock, given)
            raise
        expected = stock(**given)
    for part, value in inputs.outputs(actual).items():
        torch.testing.assert_close(value, inputs.outputs(expected)[part], rtol=1e-4, atol=1e-4)


def in_one_graph(model, given):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="eager")(**given)


def skip_unless_it_compiles(stock, given):
    try:
        in_one_graph(stock, given)
    except Exception as error:  # noqa: BLE001  whatever the compiler says of stock, it says nothing of ours
        pytest.skip(f"stock doesn't compile to one graph in this release: {str(error).splitlines()[0]}")
