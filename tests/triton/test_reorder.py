"""Columns of x in another order, alone and in quantized_linear: equal to `index_select` bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops import probe_cases
from hf_rocm.ops.four_bit import INT4, quantize_groups
from hf_rocm.ops.triton import quantized
from hf_rocm.ops.triton.tiles import reorder_tile
from tests.triton.routed import compiled_once, random, with_gaps
from tests.triton.test_quantized import BF16, FORMS, FP16, SPEC


# With 9 rows, blocks are wider.
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (64,), (1, 1056), (2, 3, 63), (9, 2100)], ids=str)
def test_columns_are_copied_in_the_given_order(shape, dtype):
    x = random(*shape, dtype=dtype)
    order = torch.randperm(shape[-1], generator=torch.Generator().manual_seed(1))
    for stored in (order, order.int()):
        assert torch.equal(quantized.reorder(x, stored), x.index_select(-1, order))
    if x.dim() > 1:
        assert torch.equal(quantized.reorder(with_gaps(x), order), x.index_select(-1, order))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0)], ids=str)
def test_nothing_is_launched_for_an_empty_x(shape, monkeypatch):
    monkeypatch.setattr(quantized, "launch", None)
    x, order = torch.zeros(shape, dtype=BF16), torch.arange(shape[-1])
    assert quantized.reorder(x, order).shape == shape


def test_blocks_cover_several_numbers_of_columns():
    assert [reorder_tile(rows)[0] for rows in (1, 8, 9, 64)] == [512, 512, 2048, 2048]


@pytest.mark.parametrize("form", [{}, *FORMS], ids=str)
@pytest.mark.parametrize("m", [0, 1, 3, 64, 70])
def test_columns_of_x_are_reordered_after_the_norm(m, form):
    """The results equal those of separate operations bit for bit. With 70 rows, the weight is dequantised."""
    n, k = 38, 1280
    columns = n // 2 if "activation" in form else n
    x, weight = with_gaps(random(2, m, k, dtype=BF16))[1], random(n, k, dtype=BF16, seed=1) * k**-0.5
    order = torch.randperm(k, generator=torch.Generator().manual_seed(2))
    arguments = *quantize_groups(weight, 64), random(n, dtype=BF16, seed=3) if "bias" in form else None
    kwargs: dict[str, Any] = {"activation": form.get("activation")}
    if "residual" in form:
        kwargs["residual"] = random(m, columns, dtype=BF16, seed=4)
    norm = ops.Norm(random(k, dtype=BF16, seed=5), 1e-5, True) if "norm" in form else None
    with options.override(tier="triton"):
        normed = x if norm is None else ops.rms_norm(x, norm.weight, eps=norm.eps, one_plus=norm.one_plus)
        expected = ops.quantized_linear(normed.index_select(-1, order), *arguments, **kwargs)
        for stored in (order, order.int()):
            assert torch.equal(ops.quantized_linear(x, *arguments, norm=norm, order=stored, **kwargs), expected)


def test_the_kernel_of_the_norm_reorders_few_rows(monkeypatch):
    # A program processes several rows, with padding after the last column.
    x, weight = random(2, 3, 768, dtype=BF16)[..., 192:576], random(32, 384, dtype=BF16, seed=1)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(2)).int()
    norm, data = ops.Norm(random(384, dtype=BF16, seed=3), 1e-5, False), quantize_groups(weight, 64)
    with options.override(tier="triton"):
        normed = ops.rms_norm(x, norm.weight, eps=norm.eps)
        expected = ops.quantized_linear(normed, *data, order=order)
        monkeypatch.setattr(quantized, "_reorder", None)
        assert torch.equal(ops.quantized_linear(x, *data, norm=norm, order=order), expected)


@pytest.mark.parametrize(("name", "rows"), [(quantized.NAME, 1), (quantized.DEQUANTIZE, 0)])
def test_the_first_use_check_passes(name, rows):
    spec = SPEC._replace(format=INT4, group=64, k=256, n=32, rows=rows, order=True)
    assert probe_cases.check("quantized_linear", "triton", name, spec) is None


def test_it_compiles_into_one_graph():
    words, scale = quantize_groups(random(32, 256, dtype=BF16), 128)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).int()
    for m, operator in ((3, "triton_quantized_linear"), (70, "triton_reorder")):
        nodes = compiled_once(lambda x: ops.quantized_linear(x, words, scale, order=order), random(m, 256, dtype=BF16))
        assert any(operator in node for node in nodes)
