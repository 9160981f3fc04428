"""rms_norm and add_rms_norm in the Triton kernel, compared with float64 and with transformers' layers."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.ops.pointwise import eager_rms_norm
from hf_rocm.ops.triton import norm
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, random, routed

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
each_form = pytest.mark.parametrize("one_plus", [False, True])


@each_dtype
@each_form
@pytest.mark.parametrize("shape", [(1, 8), (3, 63), (2, 5, 64), (7, 1), (37, 128), (2, 3000)], ids=str)
def test_rms_norm(shape, one_plus, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    # some rows are so small that eps has an effect
    x *= 4.0 ** -torch.arange(x.numel() // shape[-1]).remainder(5).reshape(*shape[:-1], 1).to(dtype)
    output = routed("rms_norm", x, weight, eps=1e-6, one_plus=one_plus)
    expected = eager_rms_norm(x.double(), weight.double(), 1e-6, one_plus)
    assert_as_good_as_eager(output, eager_rms_norm(x, weight, 1e-6, one_plus), expected)
    for first in (0, 1):  # NaN in x affects only its row
        lost = (torch.arange(x.numel() // shape[-1]) % 2 == first).view(shape[:-1])
        apart = routed("rms_norm", x.masked_fill(lost[..., None], torch.nan), weight, eps=1e-6, one_plus=one_plus)
        assert apart[lost].isnan().all() and torch.equal(apart[~lost], output[~lost])
    for first in range(3):  # NaN in the weight affects only its column
        lost = torch.arange(shape[-1]) % 3 == first
        apart = routed("rms_norm", x, weight.masked_fill(lost, torch.nan), eps=1e-6, one_plus=one_plus)
        assert apart[..., lost].isnan().all() and torch.equal(apart[..., ~lost], output[..., ~lost])


@each_dtype
@each_form
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 63), (5, 2560)], ids=str)
def test_add_rms_norm(shape, one_plus, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    output, total = routed("add_rms_norm", x, residual, weight, eps=1e-5, one_plus=one_plus)
    assert torch.equal(total, x + residual)
    expected = eager_rms_norm(total.double(), weight.double(), 1e-5, one_plus)
    assert_as_good_as_eager(output, eager_rms_norm(total, weight, 1e-5, one_plus), expected)
    assert torch.equal(output, routed("rms_norm", total, weight, eps=1e-5, one_plus=one_plus))
    lost = torch.arange(shape[-1]) % 3 == 1  # NaN in the sum affects the whole row, and NaN in the weight its column
    residual.view(-1, shape[-1])[-1].masked_fill_(lost, torch.nan)
    weight.masked_fill_(lost, torch.nan)
    output, total = routed("add_rms_norm", x, residual, weight, eps=1e-5, one_plus=one_plus)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(output.view(-1, shape[-1])[:-1].isnan().any(0), lost & (output.numel() > shape[-1]))


@each_dtype
@each_form
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 63), (5, 2560)], ids=str)
def test_norm_add(shape, one_plus, dtype):
    """Compare the sum with float64, and the second norm of that sum. A NaN stays in its row or its column."""
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    first, second = (random(shape[-1], dtype=dtype, seed=seed) for seed in (2, 3))
    norms = ops.Norm(first, 1e-5, one_plus), ops.Norm(second, 1e-6, one_plus)
    normed, total = routed("norm_add", x, residual, *norms)
    eager = residual + eager_rms_norm(x, first, 1e-5, one_plus)
    expected = residual.double() + eager_rms_norm(x.double(), first.double(), 1e-5, one_plus)
    assert_as_good_as_eager(total, eager, expected)
    expected = eager_rms_norm(total.double(), second.double(), 1e-6, one_plus)
    assert_as_good_as_eager(normed, eager_rms_norm(total, second, 1e-6, one_plus), expected)
    none, alone = routed("norm_add", x, residual, norms[0])
    assert none is None and torch.equal(alone, total)
    lost = torch.arange(shape[-1]) % 3 == 1
    damaged = x.clone()
    damaged.view(-1, shape[-1])[-1].masked_fill_(lost, torch.nan)
    for result, whole in zip(routed("norm_add", damaged, residual, *norms), (normed, total), strict=True):
        rows, others = result.view(-1, shape[-1]), whole.view(-1, shape[-1])
        assert rows[-1].isnan().all() and torch.equal(rows[:-1], others[:-1])
    _, total = routed("norm_add", x, residual, ops.Norm(first.masked_fill(lost, torch.nan), 1e-5, one_plus), norms[1])
    assert torch.equal(total.isnan(), lost.expand(shape))


def test_it_rounds_like_transformers():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = random(64, 96, dtype=torch.bfloat16)
    for kind, one_plus in ((LlamaRMSNorm, False), (GemmaRMSNorm, True)):
        layer = kind(96, eps=1e-6).to(torch.bfloat16)
        layer.weight.data.copy_(random(96, dtype=torch.bfloat16, seed=1))
        with torch.no_grad():
            stock = layer(x)
            actual = routed("rms_norm", x, layer.weight, eps=1e-6, one_plus=one_plus)
        # sums of squares in a different order move a few values across a rounding boundary
        assert (actual != stock).float().mean() < 1e-3


@pytest.mark.parametrize("part", [slice(0, 4), slice(4, 6)], ids=["queries", "keys"])
def test_heads_of_a_fused_projection_are_read_in_place(part, monkeypatch):
    fused = random(2, 5, 8, 16, dtype=torch.bfloat16)
    view = fused[:, :, part]
    assert not view.is_contiguous()
    weight = random(16, dtype=torch.bfloat16, seed=1)
    expected = routed("rms_norm", view.contiguous(), weight, eps=1e-6)
    wide = eager_rms_norm(view.double(), weight.double(), 1e-6, False)
    assert_as_good_as_eager(expected, eager_rms_norm(view, weight, 1e-6, False), wide)
    monkeypatch.setattr(torch.Tensor, "contiguous", _only_whole(torch.Tensor.contiguous))
    assert torch.equal(routed("rms_norm", view, weight, eps=1e-6), expected)


def test_rows_are_counted_with_64_bits_if_there_are_so_many():
    """For 2³¹ rows, only the first programs are launched."""
    from hf_rocm.ops.triton.kernels.norm import rms_norm_kernel

    fused = random(4, 3, 16, dtype=torch.bfloat16)
    x, weight, out = fused[:, :2], random(16, dtype=torch.bfloat16, seed=1), torch.empty(8, 16, dtype=torch.bfloat16)
    sizes = {"DIM": 16, "ONE_PLUS": False, "ROWS": 4, "BLOCK": 16}
    rms_norm_kernel[(2,)](x, None, weight, out, None, 2**31 + 3, 48, 2, 16, 1e-6, None, 0.0, **sizes, num_warps=1)
    assert torch.equal(out.view(4, 2, 16), routed("rms_norm", x, weight, eps=1e-6))


def _only_whole(contiguous):
    def checked(self, **keywords):
        assert self.is_contiguous(), "a copy"
        return contiguous(self, **keywords)

    return checked


def test_rows_with_more_than_two_strides_are_copied():
    x = random(3, 4, 2, 8, dtype=torch.float32).transpose(0, 1)
    weight = random(8, dtype=torch.float32, seed=1)
    assert norm._two_strides(x) is None
    output = routed("rms_norm", x, weight, eps=1e-6)
    assert torch.equal(output, routed("rms_norm", x.clone(), weight, eps=1e-6))
    wide = eager_rms_norm(x.double(), weight.double(), 1e-6, False)
    assert_as_good_as_eager(output, eager_rms_norm(x, weight, 1e-6, False), wide)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 4)], ids=str)
def test_nothing_is_launched_for_empty_inputs(shape):
    x, weight = torch.empty(shape), torch.ones(shape[-1])
    assert routed("rms_norm", x, weight, eps=1e-6).shape == x.shape
    assert routed("add_rms_norm", x, x, weight, eps=1e-6)[1].shape == x.shape


@pytest.mark.parametrize(
    ("x", "weight", "word"),
    [
        (torch.ones(2, 4, requires_grad=True), torch.ones(4), "gradient"),
        (torch.ones(2, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64), "float64"),
        (torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), "weight of torch.float32"),
        (torch.ones(1, 32769), torch.ones(32769), "at most 32768"),
    ],
    ids=["grad", "fp64", "mixed", "wide"],
)
def test_refusals(x, weight, word):
    from hf_rocm.errors import TierUnavailable

    with pytest.raises(TierUnavailable, match=word):
        routed("rms_norm", x, weight, eps=1e-6)


@pytest.mark.parametrize(("rows", "dim"), [(1, 4096), (1, 64), (4096, 8192), (100_000, 128), (3, 32768)])
def test_tiles_are_powers_of_two(rows, dim):
    many, block, threads = norm.tile(rows, dim)
    assert block >= dim and many * block <= max(2048, block)
    assert 64 <= threads <= 1024 and threads & (threads - 1) == 0


def test_it_is_one_op_of_a_compiled_graph():
    weight = torch.ones(16)
    nodes = compiled_once(lambda x: ops.rms_norm(x, weight, eps=1e-6) * 2, random(2, 16, dtype=torch.float32))
    assert "hf_rocm.triton_rms_norm.default" in nodes
