"""Norms and residual sums in the Triton kernels, compared with float64 and with transformers' and PyTorch's layers."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.ops.layer_norm import eager_add_layer_norm
from hf_rocm.ops.pointwise import eager_rms_norm
from hf_rocm.ops.triton import norm
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, random, routed

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_form = pytest.mark.parametrize("one_plus", [False, True])


@every_dtype
@every_form
@pytest.mark.parametrize("shape", [(1, 8), (3, 63), (2, 5, 64), (7, 1), (37, 128), (2, 3000)], ids=str)
def test_rms_norm(shape, one_plus, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    # some rows are so small that eps has an effect
    x *= 4.0 ** -torch.arange(x.numel() // shape[-1]).remainder(5).reshape(*shape[:-1], 1).to(dtype)
    output = routed("rms_norm", x, weight, eps=1e-6, one_plus=one_plus)
    expected = eager_rms_norm(x.double(), weight.double(), 1e-6, one_plus)
    assert_as_good_as_eager(output, eager_rms_norm(x, weight, 1e-6, one_plus), expected)
    # NaN in x affects only its row.
    for first in (0, 1):
        mask = (torch.arange(x.numel() // shape[-1]) % 2 == first).view(shape[:-1])
        masked = routed("rms_norm", x.masked_fill(mask[..., None], torch.nan), weight, eps=1e-6, one_plus=one_plus)
        assert masked[mask].isnan().all() and torch.equal(masked[~mask], output[~mask])
    # NaN in the weight affects only its column.
    for first in range(3):
        mask = torch.arange(shape[-1]) % 3 == first
        masked = routed("rms_norm", x, weight.masked_fill(mask, torch.nan), eps=1e-6, one_plus=one_plus)
        assert masked[..., mask].isnan().all() and torch.equal(masked[..., ~mask], output[..., ~mask])


@every_dtype
@every_form
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 63), (5, 2560)], ids=str)
def test_add_rms_norm(shape, one_plus, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    output, total = routed("add_rms_norm", x, residual, weight, eps=1e-5, one_plus=one_plus)
    assert torch.equal(total, x + residual)
    expected = eager_rms_norm(total.double(), weight.double(), 1e-5, one_plus)
    assert_as_good_as_eager(output, eager_rms_norm(total, weight, 1e-5, one_plus), expected)
    assert torch.equal(output, routed("rms_norm", total, weight, eps=1e-5, one_plus=one_plus))
    # NaN in the sum affects the whole row, and NaN in the weight its column.
    mask = torch.arange(shape[-1]) % 3 == 1
    residual.view(-1, shape[-1])[-1].masked_fill_(mask, torch.nan)
    weight.masked_fill_(mask, torch.nan)
    output, total = routed("add_rms_norm", x, residual, weight, eps=1e-5, one_plus=one_plus)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(output.view(-1, shape[-1])[:-1].isnan().any(0), mask & (output.numel() > shape[-1]))


@every_dtype
@every_form
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 63), (5, 2560)], ids=str)
def test_norm_add(shape, one_plus, dtype):
    """Compare the sum, and the second norm of that sum, with float64. A NaN stays in its row or its column."""
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    first, second = (random(shape[-1], dtype=dtype, seed=seed) for seed in (2, 3))
    norms = ops.Norm(first, 1e-5, one_plus), ops.Norm(second, 1e-6, one_plus)
    normed, total = routed("norm_add", x, residual, *norms)
    eager = residual + eager_rms_norm(x, first, 1e-5, one_plus)
    expected = residual.double() + eager_rms_norm(x.double(), first.double(), 1e-5, one_plus)
    assert_as_good_as_eager(total, eager, expected)
    expected = eager_rms_norm(total.double(), second.double(), 1e-6, one_plus)
    assert_as_good_as_eager(normed, eager_rms_norm(total, second, 1e-6, one_plus), expected)
    no_norm, sum_only = routed("norm_add", x, residual, norms[0])
    assert no_norm is None and torch.equal(sum_only, total)
    mask = torch.arange(shape[-1]) % 3 == 1
    damaged = x.clone()
    damaged.view(-1, shape[-1])[-1].masked_fill_(mask, torch.nan)
    for result, whole in zip(routed("norm_add", damaged, residual, *norms), (normed, total), strict=True):
        rows, others = result.view(-1, shape[-1]), whole.view(-1, shape[-1])
        assert rows[-1].isnan().all() and torch.equal(rows[:-1], others[:-1])
    _, total = routed("norm_add", x, residual, ops.Norm(first.masked_fill(mask, torch.nan), 1e-5, one_plus), norms[1])
    assert torch.equal(total.isnan(), mask.expand(shape))


@every_dtype
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("keep_sum", [True, False], ids=["sum", "norm"])
@pytest.mark.parametrize(
    ("shape", "programs"), [((1, 8), 256), ((3, 63), 256), ((2, 3, 1000), 256), ((7, 1), 1), ((37, 128), 1)], ids=str
)
def test_add_layer_norm(shape, programs, keep_sum, biased, dtype, monkeypatch):
    """Rows have a mean that is larger than their standard deviation. Some rows are so small that eps has an effect."""
    monkeypatch.setattr(norm, "PROGRAMS", programs)
    x, residual = random(*shape, dtype=dtype) + 1.5, random(*shape, dtype=dtype, seed=1)
    small = 4.0 ** -torch.arange(x.numel() // shape[-1]).remainder(5).reshape(*shape[:-1], 1).to(dtype)
    x, residual = x * small, residual * small
    weight, bias = random(shape[-1], dtype=dtype, seed=2), random(shape[-1], dtype=dtype, seed=3) if biased else None

    def run(x=x, residual=residual, weight=weight, bias=bias):
        output, total = routed("add_layer_norm", x, residual, weight, bias, eps=1e-5, keep_sum=keep_sum)
        if keep_sum:
            torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)
        return output if keep_sum or total is None else None

    output = run()
    exact = [None if one is None else one.double() for one in (x + residual, 0 * residual, weight, bias)]
    expected = eager_add_layer_norm(*exact, 1e-5, False)[0]
    assert_as_good_as_eager(output, eager_add_layer_norm(x, residual, weight, bias, 1e-5, False)[0], expected)
    # NaN in a term affects only its row.
    for first in (0, 1):
        mask = (torch.arange(x.numel() // shape[-1]) % 2 == first).view(shape[:-1])
        for masked in (
            run(x=x.masked_fill(mask[..., None], torch.nan)),
            run(residual=residual.masked_fill(mask[..., None], torch.nan)),
        ):
            assert masked[mask].isnan().all() and torch.equal(masked[~mask], output[~mask])
    # NaN in weight or bias affects only its column.
    for first in range(3):
        mask = torch.arange(shape[-1]) % 3 == first
        damaged = [run(weight=weight.masked_fill(mask, torch.nan))]
        damaged += [run(bias=bias.masked_fill(mask, torch.nan))] if biased else []
        for masked in damaged:
            assert masked[..., mask].isnan().all() and torch.equal(masked[..., ~mask], output[..., ~mask])


@every_dtype
def test_a_layer_norm_rounds_like_pytorch(dtype):
    """PyTorch sums in a different order, which moves a few values across a rounding boundary."""
    x, residual = random(64, 96, dtype=dtype), random(64, 96, dtype=dtype, seed=1)
    weight, bias = random(96, dtype=dtype, seed=2), random(96, dtype=dtype, seed=3)
    output, _ = routed("add_layer_norm", x, residual, weight, bias, eps=1e-12, keep_sum=True)
    stock = torch.nn.functional.layer_norm(x + residual, (96,), weight, bias, 1e-12)
    torch.testing.assert_close(output, stock, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    if dtype is not torch.float32:
        assert (output != stock).float().mean() < 5e-3


def test_strided_terms_of_a_layer_norm_are_copied():
    wide, residual = random(5, 3, 32, dtype=torch.bfloat16), random(3, 16, 5, dtype=torch.bfloat16, seed=1)
    x, residual = wide[..., :16].transpose(0, 1), residual.transpose(1, 2)
    weight, bias = random(32, dtype=torch.bfloat16, seed=2)[::2], random(16, dtype=torch.bfloat16, seed=3)
    output, _ = routed("add_layer_norm", x, residual, weight, bias, eps=1e-5)
    packed = [one.contiguous() for one in (x, residual, weight, bias)]
    assert torch.equal(output, routed("add_layer_norm", *packed, eps=1e-5)[0])
    assert torch.equal(output, routed("add_layer_norm", *packed, eps=1e-5, keep_sum=True)[0])


def test_an_rms_norm_rounds_like_transformers():
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


def test_more_rows_than_an_int32_can_count_are_supported():
    """The number of rows is above 2³¹, but only the first two programs are launched."""
    from hf_rocm.ops.triton.kernels.norm import rms_norm_kernel

    fused = random(4, 3, 16, dtype=torch.bfloat16)
    x, weight, out = fused[:, :2], random(16, dtype=torch.bfloat16, seed=1), torch.empty(8, 16, dtype=torch.bfloat16)
    sizes = {"DIM": 16, "ONE_PLUS": False, "ROWS": 4, "BLOCK": 16}
    rms_norm_kernel[(2,)](x, None, weight, out, None, 2**31 + 3, 48, 2, 16, 1e-6, None, 0.0, None, **sizes, num_warps=1)
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
    assert routed("add_layer_norm", x, x, weight, eps=1e-6, keep_sum=True)[1].shape == x.shape


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
def test_unsupported_calls_are_refused(x, weight, word):
    from hf_rocm.errors import TierUnavailable

    with pytest.raises(TierUnavailable, match=word):
        routed("rms_norm", x, weight, eps=1e-6)
    with pytest.raises(TierUnavailable, match=word):
        routed("add_layer_norm", x, x, weight, eps=1e-6)


@pytest.mark.parametrize(("rows", "dim"), [(1, 4096), (1, 64), (4096, 8192), (100_000, 128), (3, 32768)])
def test_a_block_covers_a_row_and_threads_are_a_power_of_two(rows, dim):
    count, block, threads = norm.tile(rows, dim)
    assert block >= dim and count * block <= max(2048, block)
    assert 64 <= threads <= 1024 and threads & (threads - 1) == 0


def test_it_is_one_op_of_a_compiled_graph():
    weight = torch.ones(16)
    nodes = compiled_once(lambda x: ops.rms_norm(x, weight, eps=1e-6) * 2, random(2, 16, dtype=torch.float32))
    assert "hf_rocm.triton_rms_norm.default" in nodes


def test_a_layer_norm_is_one_op_of_a_compiled_graph():
    weight, bias, residual = torch.ones(16), torch.zeros(16), random(2, 16, dtype=torch.float32, seed=1)
    for keep_sum in (False, True):
        nodes = compiled_once(
            lambda x, keep_sum=keep_sum: ops.add_layer_norm(x, residual, weight, bias, eps=1e-6, keep_sum=keep_sum)[0],
            random(2, 16, dtype=torch.float32),
        )
        assert "hf_rocm.triton_add_layer_norm.default" in nodes
