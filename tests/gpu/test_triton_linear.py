"""The Triton GEMM kernels for few rows, on a GPU: compared with float64, and in a captured CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops.linear import eager_fused_linear, eager_linear
from tests.tolerance import assert_as_good_as_eager

pytestmark = pytest.mark.gpu

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


@pytest.fixture(autouse=True)
def unprobed():
    with options.override(probe=False, tiers={"linear": "triton"}):
        yield


@every_dtype
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 1024), (1000, 777), (96, 14336)])
@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 17, 19, 32])
def test_linear(m, n, k, dtype):
    x, weight, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1) * k**-0.5, random(n, dtype=dtype)
    with ops.recording() as routes:
        output = ops.linear(x, weight, bias)
    assert [route.tier for route in routes] == ["triton"]
    expected = eager_linear(x.double(), weight.double(), bias.double())
    assert_as_good_as_eager(output, eager_linear(x, weight, bias), expected)


@every_dtype
@pytest.mark.parametrize("k", [4096, 520])
@pytest.mark.parametrize("m", [1, 2, 8, 32])
@pytest.mark.parametrize("form", ["norm", "1 + w", "gate", "all"])
def test_norm_activation_and_residual_are_fused(form, m, k, dtype):
    n = 2048
    x, weight = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1) * k**-0.5
    norm_weight = random(k, dtype=dtype, seed=2) if form in ("norm", "1 + w", "all") else None
    activation = "silu" if form in ("gate", "all") else None
    residual = random(m, n if activation is None else n // 2, dtype=dtype, seed=3) if form == "all" else None
    one_plus = form == "1 + w"
    keywords: dict[str, Any] = {
        "norm": None if norm_weight is None else ops.Norm(norm_weight, 1e-5, one_plus),
        "activation": activation,
    }
    with ops.recording() as routes:
        output = ops.fused_linear(x, weight, residual=residual, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [("fused_linear", "triton")]
    tensors = (x, weight, None, norm_weight, residual)
    wide = (None if tensor is None else tensor.double() for tensor in tensors)
    expected = eager_fused_linear(*wide, 1e-5, one_plus, activation)
    assert_as_good_as_eager(output, eager_fused_linear(*tensors, 1e-5, one_plus, activation), expected)


@pytest.mark.parametrize("m", [1, 8, 20])
def test_a_replay_uses_the_current_inputs(m):
    """Nothing is read on the host, so a replay uses the current values of its tensors."""
    dtype = torch.bfloat16
    x, weight, norm_weight = (
        random(m, 1024, dtype=dtype),
        random(2048, 1024, dtype=dtype, seed=1) / 32,
        random(1024, dtype=dtype, seed=2),
    )
    keywords: dict[str, Any] = {"norm": ops.Norm(norm_weight, 1e-5), "activation": "silu"}
    ops.fused_linear(x, weight, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.fused_linear(x, weight, **keywords)
    x.copy_(random(m, 1024, dtype=dtype, seed=5))
    graph.replay()
    assert torch.equal(output, ops.fused_linear(x, weight, **keywords))
