"""Calls to operations that the Triton tier must serve."""

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


def with_gaps(x: Tensor) -> Tensor:
    """Returns the same numbers with other strides: a view of a tensor with one more row in the second-to-last dim."""
    wide = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1]), torch.nan)
    wide[..., :-1, :] = x
    return wide[..., :-1, :]


def shifted(tensor: Tensor) -> Tensor:
    """Returns the same numbers at an address that is not a multiple of four."""
    flat = tensor.new_zeros(tensor.numel() + 1)
    flat[1:] = tensor.flatten()
    assert flat[1:].data_ptr() % 4
    return flat[1:].view(tensor.shape)


def sizes(m: int, n: int, k: int) -> list[tuple[int, int, int]]:
    """Returns these sizes of a GEMM. For machine code, adds sizes that use the same compiled variant of the kernel.

    Most lanes of a partial block are idle, which hides errors in them. The additional sizes have full blocks, and tails
    of other lengths.
    """
    if suite.gpu() is None:
        return [(m, n, k)]
    return [(m, n, k), (m + 16 * (m > 1), n + 16, k + 1024), (m, n + 48, k + 112)]


def windows(terms: Mapping[str, Any], more: int) -> list[Mapping[str, Any]]:
    """Returns these terms of attention. If their window is larger than 1, adds the same terms with a larger window.

    more: added to the window; a multiple of 16 keeps the compiled variant. A window of 1 has a separate variant.
    """
    window = terms.get("window") or 1
    return [terms] if window == 1 else [terms, {**terms, "window": window + more}]


def check_more_keys(monkeypatch: pytest.MonkeyPatch, operation: str, name: str, spec: Any) -> None:
    """For machine code: run a first-use check of attention with enough keys for loops to have several iterations.

    The compiled variants are those of the check, because the sizes have the same remainders modulo 16.
    """
    if suite.gpu() is None:
        return
    module = import_module(operations()[operation].cases.__module__)
    monkeypatch.setattr(module, "LENGTH", probe_cases.LENGTH + 512)
    monkeypatch.setattr(module, "LONG", probe_cases.LONG + 1440)
    for window in {spec.window, spec.window and spec.window + 1024}:
        assert probe_cases.check(operation, "triton", name, tuple(spec._replace(window=window))) is None


def assert_independent(
    call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, *, gated: bool = False
) -> None:
    """For machine code: NaN in a row of x [M, K] or W [N, K] turns only that row or column of the result into NaN."""
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
    """Integers x [rows, k] and W [n, k] for which x @ W.T is exact in fp32 in any order of summation.

    Large terms cancel, so a wrong last bit of any term changes the result. Half of the results are midway between two
    numbers of the dtype, so a different rounding changes them.
    """
    x = (random(rows, k, dtype=torch.float32) * 40).round().clamp(-127, 127)
    weight = (random(n, k, dtype=torch.float32, seed=1) * 40).round().clamp(-127, 127)
    half = (k - 2) // 2
    x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half], -weight[:, :half]
    # Above this value, odd integers are midway between two numbers of the dtype.
    middle = 2 / torch.finfo(dtype).eps
    x[:, 2 * half :], weight[:, 2 * half :] = 0, 0
    x[:, -2:] = 1 - 2 * (torch.arange(rows) % 2)[:, None]
    weight[:, -2], weight[:, -1] = middle, torch.arange(n) % 64
    return x.to(dtype), weight.to(dtype)


def here() -> Device:
    """Returns the device with which tests call predicates: the CPU, or the GPU whose machine code is executed."""
    return describe(torch.device("cpu"))


def routed(operation: str, *arguments: Any, **keywords: Any) -> Any:
    """Call `ops.<operation>`, and check that the Triton tier served it."""
    with options.override(tier="triton"), ops.recording() as routes:
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [(operation, "triton")]
    return output


def compiled_once(function: Callable[..., Tensor], *arguments: Tensor) -> list[str]:
    """Compare compiled with uncompiled results, and with the eager tier. Returns the nodes of the single graph."""
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
