"""Two launches with the same key have the same properties on which Triton specialises a kernel."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from hf_rocm.ops.eight_bit import INT8, quantize_rows
from hf_rocm.ops.four_bit import quantize_groups
from hf_rocm.ops.triton import activation, decode, flash, norm, quantized, rope, step
from hf_rocm.ops.triton.launch import form, forms_of_strides
from tests.triton.test_begin_step import step_call

BF16, FP16 = torch.bfloat16, torch.float16
# Kernel → arguments for which it is not specialised.
GENERAL = {
    "begin_kernel": {"position", "row", "row_2", "first", "drafts", "length", "more"},
    "decode_kernel": {"keys"},
    "flash_kernel": {"sequences", "span", "queries", "keys"},
}


def tensors(*shape: int) -> list[torch.Tensor]:
    """Tensors of this shape: of two dtypes, and one that is not aligned."""
    size = torch.Size(shape).numel()
    shifted = torch.zeros(size + 1, dtype=BF16)[1:].view(shape)
    return [torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=FP16), shifted]


def attention_calls(queries: int) -> Any:
    for x, (scale, softcap) in itertools.product(tensors(2, 4, queries, 16), ((1, None), (0.125, 30), (2, 30.0))):
        yield x, x[:, :2], x[:, :2], scale, softcap


def norms() -> None:
    for x in (*tensors(3, 64), *tensors(16, 64), torch.zeros(3, 80, dtype=BF16)[:, :64]):
        weight = torch.ones(64, dtype=x.dtype)
        for order in (None, torch.arange(64), torch.arange(64).int()):
            norm._forward(x, weight, 1e-6, False, order)
        norm._add_forward(x, x, weight, 1, False)
        norm._layer_forward(x, x, weight, None, 1e-6, False)
        norm._layer_forward(x, x, weight, weight, 1, True)
        for then in (None, weight):
            norm._norm_add_forward(x, x, weight, then, 1e-6, 1, False)


def activations() -> None:
    for x in (*tensors(3, 64), *tensors(1, 128), torch.zeros(3, 80, dtype=BF16)[:, :64]):
        activation._act_forward(x, "quick_gelu")
        activation._forward(x, "silu", False, 7, 1.702)


def rotations() -> None:
    for x, rows in itertools.product(tensors(1, 4, 2, 16), (1, 2)):
        cos = torch.zeros(1, 2, 16, dtype=x.dtype)[:, :rows]
        query, key, weight = x[:, :, :rows], x[:, :2, :rows], torch.ones(16, dtype=x.dtype)
        rope._forward(query, key, cos, cos, False)
        caches = torch.zeros(1, 2, 8, 16, dtype=x.dtype), torch.zeros(1, 2, 8, 16, dtype=x.dtype)
        for position, norm_weight in itertools.product((None, torch.tensor(3), torch.arange(rows)), (None, weight)):
            norms = norm_weight, norm_weight, 1, 1e-6, False
            rope._into_cache(query, key, key, cos, cos, *caches, position, *norms, False, False)


def beginnings() -> None:
    for sources, (sizes, windows, bases), starts in itertools.product(
        (0, 1, 2), (((64,), (None,), (0,)), ((64, 16), (None, 16), (0, 0)), ((16,), (1,), (0,))), (False, True)
    ):
        for tokens in (1, 3):
            call = step_call(sizes=sizes, windows=windows, bases=bases, sources=sources, starts=starts, tokens=tokens)
            step._begin_step(*call)


def flash_attention() -> None:
    for query, key, value, scale, softcap in attention_calls(5):
        for window in (None, 1, 3):
            flash._forward(query, key, value, None, None, None, None, scale, softcap, window, True)


def decode_attention() -> None:
    for query, key, value, scale, softcap in attention_calls(1):
        for starts, lengths in ((None, torch.ones(1)), (torch.zeros(2), torch.ones(2))):
            terms = (starts, None, None, None, scale, softcap, None, True)
            decode.forward(query, key, value, lengths.long(), *terms)


def weights() -> None:
    for dtype, k in itertools.product((BF16, FP16), (256, 512)):
        numbers = torch.randn(16, k)
        words, scale = quantize_groups(numbers, 64)
        for shifted in (words, torch.cat([words.flatten()[:1], words.flatten()])[1:].view(words.shape)):
            for zeros in (None, torch.zeros(16, k // 64, dtype=torch.uint8)):
                quantized._dequantize(shifted, scale, dtype, zeros)
        quantized._dequantize(words, scale.float(), dtype, None, "nf4")
        data, row_scale = quantize_rows(numbers, INT8)
        quantized._dequantize(data, row_scale.flatten(), dtype)
        for order in (torch.arange(k), torch.arange(k).int()):
            quantized._reorder(torch.zeros(3, k, dtype=dtype), order)


@pytest.mark.parametrize(
    ("module", "run"),
    [
        (norm, norms),
        (activation, activations),
        (rope, rotations),
        (step, beginnings),
        (flash, flash_attention),
        (decode, decode_attention),
        (quantized, weights),
    ],
    ids=lambda value: getattr(value, "__name__", "").rpartition(".")[2],
)
@pytest.mark.parametrize("rocm", [False, True])
def test_a_key_distinguishes_what_a_kernel_is_specialised_on(module, run, rocm, monkeypatch):
    seen: dict[Any, Any] = {}

    def launch(kernel, grid, arguments, constants, *, forms=None, **options):
        names = [*inspect.signature(kernel.fn).parameters]
        general = GENERAL.get(kernel.fn.__name__, set())
        specialised = tuple(form(value) for name, value in zip(names, arguments, strict=False) if name not in general)
        key = (kernel.fn.__name__, *options.values(), *constants.values(), specialised if forms is None else forms)
        assert seen.setdefault(key, specialised) == specialised

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr("hf_rocm.ops.triton.launch.is_rocm", lambda: rocm)
    run()
    assert len(seen) > 3


def test_the_key_of_strides_is_short_only_if_all_are_multiples_of_16():
    assert forms_of_strides((0, 16, 4096)) is True
    for strides in ((1, 16), (8, 16), (2**31, 16), (-16, 16)):
        assert forms_of_strides(strides) == tuple(map(form, strides))
