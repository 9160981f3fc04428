"""Calls of operations that the Triton tier must serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm import ops, options
from hf_rocm.device import Device, describe
from hf_rocm.ops import probe_cases
from hf_rocm.ops.registry import operations
from tests.amdgcn import suite


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def roomy(x: Tensor) -> Tensor:
    """The same numbers with other strides: a view of a tensor with one more row in the second-to-last dim."""
    wide = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1]), torch.nan)
    wide[..., :-1, :] = x
    return wide[..., :-1, :]


def sizes(m: int, n: int, k: int) -> list[tuple[int, int, int]]:
    """These sizes of a GEMM, and as machine code also other sizes with the same compiled variant of a kernel.

    Most lanes of a partial block are idle, which hides errors in them: so there are full blocks, and tails of other
    lengths.
    """
    if suite.gpu() is None:
        return [(m, n, k)]
    return [(m, n, k), (m + 16 * (m > 1), n + 16, k + 1024), (m, n + 48, k + 112)]


def windows(terms: Mapping[str, Any], more: int) -> list[Mapping[str, Any]]:
    """These terms of attention, and if they have a window, also with one of several blocks of keys.

    more: a multiple of 16, for the same compiled form. A window of 1 has a form of its own.
    """
    window = terms.get("window") or 1
    return [terms] if window == 1 else [terms, {**terms, "window": window + more}]


def check_more_keys(monkeypatch: pytest.MonkeyPatch, operation: str, name: str, spec: Any) -> None:
    """As machine code: a first-use check of attention with so many keys that loops have several iterations.

    Its compiled forms are those of the check: the sizes have the same remainders modulo 16.
    """
    if suite.gpu() is None:
        return
    module = import_module(operations()[operation].cases.__module__)
    monkeypatch.setattr(module, "LENGTH", probe_cases.LENGTH + 512)
    monkeypatch.setattr(module, "LONG", probe_cases.LONG + 1440)
    for window in {spec.window, spec.window and spec.window + 1024}:
        assert probe_cases.check(operation, "triton", name, tuple(spec._replace(window=window))) is None


def assert_apart(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, *, gated: bool = False) -> None:
    """As machine code: NaN in some rows of x [M, K] or W [N, K] results in NaN there, and nowhere else."""
    if suite.gpu() is None:
        return
    whole = call(x, weight)
    for first in (0, 1):
        rows, columns = torch.arange(len(x)) % 2 == first, torch.arange(whole.shape[-1]) % 2 == first
        output = call(x.masked_fill(rows[:, None], torch.nan), weight)
        assert output[rows].isnan().all() and torch.equal(output[~rows], whole[~rows])
        filled = columns.repeat(2) if gated else columns
        output = call(x, weight.masked_fill(filled[:, None], torch.nan))
        assert output[:, columns].isnan().all() and torch.equal(output[:, ~columns], whole[:, ~columns])


def exact(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, k] and W [n, k] of integers whose product is exact in fp32 in any order, and sensitive to errors.

    Large terms cancel, so that a wrong last bit of one changes the result. Half of the results are midway between two
    numbers of the dtype, so that another rounding changes them.
    """
    x = (random(rows, k, dtype=torch.float32) * 40).round().clamp(-127, 127)
    weight = (random(n, k, dtype=torch.float32, seed=1) * 40).round().clamp(-127, 127)
    half = (k - 2) // 2
    x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half], -weight[:, :half]
    middle = 2 / torch.finfo(dtype).eps  # from here on, odd numbers are midway
    x[:, 2 * half :], weight[:, 2 * half :] = 0, 0
    x[:, -2:] = 1 - 2 * (torch.arange(rows) % 2)[:, None]
    weight[:, -2], weight[:, -1] = middle, torch.arange(n) % 64
    return x.to(dtype), weight.to(dtype)


def here() -> Device:
    """The device of the test tensors for predicates: the CPU, or the GPU whose code is executed."""
    return describe(torch.device("cpu"))


def routed(operation: str, *arguments: Any, **keywords: Any) -> Any:
    """Call `ops.<operation>`, and check that the Triton tier served it."""
    with options.override(tier="triton"), ops.recording() as routes:
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [(operation, "triton")]
    return output


def compiled_once(function: Callable[..., Tensor], *arguments: Tensor) -> list[str]:
    """The nodes of its single torch.compile graph, after comparing the compiled and the eager results."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with options.override(tier="triton"), torch.no_grad():
        expected = function(*arguments)
        actual = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    assert torch.equal(actual, expected)
    with options.override(tier="eager"), torch.no_grad():
        oracle = function(*arguments)
    torch.testing.assert_close(actual, oracle, rtol=0, atol=oracle.abs().max().item() * 0.02)
    assert len(graphs) == 1
    return [str(node.target) for node in graphs[0].graph.nodes]
