"""With torch.compile, a model becomes one graph with hf_rocm's operations, if stock becomes one graph.

Tracing a model takes seconds, so only about a quarter of the models are traced, in the newest tested release that has
the overlay and with one layer of each kind. Eight models with different inputs, masks and caches are traced in every
release, with all layers.
"""

from __future__ import annotations

import copy
import gc
import re

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.overlay import bind
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.releases import is_drawn, is_the_last

ALL_LAYERS = {"llama", "gemma2", "gpt2", "bert", "t5", "siglip", "qwen2_vl", "mixtral"}


@pytest.mark.slow
@params([case for case in CASES if case.id in ALL_LAYERS or (is_the_last(case) and is_drawn(case))], without="compile")
def test_a_model_compiles_into_one_graph_if_stock_does(case, trio):
    prepared, stock, _ = trio()
    if case.id not in ALL_LAYERS:
        stock = shortened(copy.deepcopy(stock), case)
        prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    arguments = inputs.arguments(case, prepared)
    with torch.inference_mode():
        try:
            actual, origins = in_one_graph(prepared, arguments)
        except Exception:
            skip_unless_it_compiles(stock, arguments)
            raise
        expected = stock(**arguments)
    assert_prepared(case, prepared, origins)
    for part, value in inputs.outputs(actual).items():
        torch.testing.assert_close(value, inputs.outputs(expected)[part], rtol=1e-4, atol=1e-4)


def shortened(model, case):
    """Remove trailing layers that equal an earlier one, since tracing them runs the same lines again."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and all(attends(layer, case) for layer in module):
            kinds = [kind_of(layer) for layer in module]
            del module[max((kinds.index(kind) for kind in kinds), default=0) + 1 :]
    return model


def attends(layer, case):
    return any(type(module).__name__ in case.classes() for module in layer.modules())


def kind_of(layer):
    """The names and classes of a layer's modules, and the attributes that they may branch on, except `layer_idx`."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        (name, type(module), {k: v for k, v in vars(module).items() if isinstance(v, plain) and k != "layer_idx"})
        for name, module in layer.named_modules()
    ]


def in_one_graph(model, arguments):
    """The output, and for each operation of the graph the lines of code that it comes from."""
    origins = []

    def backend(graph, _):
        origins.extend(node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    # Every garbage collection would traverse all of transformers.
    gc.disable()
    try:
        return torch.compile(model, fullgraph=True, backend=backend)(**arguments), origins
    finally:
        gc.enable()


def assert_prepared(case, model, origins):
    """Check that the graph has an operation from the replacement of every attention class of the case."""
    lines = {(file, int(line)) for origin in origins for file, line in re.findall(r'File "(.+?)", line (\d+)', origin)}
    for module in model.modules():
        if type(module).__name__ in case.classes():
            code = bind.binding_of(module).replacement.__code__
            own = {(code.co_filename, line) for _, _, line in code.co_lines()}
            assert own & lines, f"no operation comes from the replacement forward of {type(module).__name__}"


def skip_unless_it_compiles(stock, arguments):
    try:
        in_one_graph(stock, arguments)
    except Exception as error:  # noqa: BLE001  the compiler's errors on stock are not about hf_rocm
        pytest.skip(f"stock doesn't compile to one graph in this release: {str(error).splitlines()[0]}")
