"""Under torch.compile each model is one graph with ours in it, wherever stock's is one."""

from __future__ import annotations

import re

import pytest
import torch

from hf_rocm.overlay import bind
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
            actual, origins = in_one_graph(ours, given)
        except Exception:
            skip_unless_it_compiles(stock, given)
            raise
        expected = stock(**given)
    assert_ours(case, ours, origins)
    for part, value in inputs.outputs(actual).items():
        torch.testing.assert_close(value, inputs.outputs(expected)[part], rtol=1e-4, atol=1e-4)


def in_one_graph(model, given):
    """Its output, and for each operation of the graph the lines of code that it comes from."""
    origins = []

    def backend(graph, _):
        origins.extend(node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)(**given), origins


def assert_ours(case, model, origins):
    """Of the replacement of every attention class of the case, some line is where an operation comes from."""
    lines = {(file, int(line)) for each in origins for file, line in re.findall(r'File "(.+?)", line (\d+)', each)}
    for module in model.modules():
        if type(module).__name__ in case.classes():
            code = bind.binding_of(module).replacement.__code__
            own = {(code.co_filename, line) for _, _, line in code.co_lines()}
            assert own & lines, f"no operation comes from our forward of {type(module).__name__}"


def skip_unless_it_compiles(stock, given):
    try:
        in_one_graph(stock, given)
    except Exception as error:  # noqa: BLE001  whatever the compiler says of stock, it says nothing of ours
        pytest.skip(f"stock doesn't compile to one graph in this release: {str(error).splitlines()[0]}")
