"""Calls of an operation that must be served by the Triton tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_rocm import ops, options


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(operation: str, *arguments: Any, **keywords: Any) -> Any:
    """`ops.<operation>`, having proved that the Triton tier served it."""
    with options.override(tier="triton"), ops.recording() as routes:
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(each.operation, each.tier) for each in routes] == [(operation, "triton")]
    return output


def compiled_once(function: Callable[..., Tensor], *arguments: Tensor) -> list[str]:
    """The nodes of the one graph that torch.compile makes of it; what it computes is what it computes in eager."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with options.override(tier="triton"), torch.no_grad():
        expected = function(*arguments)
        actual = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    assert torch.equal(actual, expected)
    assert len(graphs) == 1
    return [str(node.target) for node in graphs[0].graph.nodes]
