"""Masks that packed sequences or lengths can express are recognised if a kernel supports the call. Others are not."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.ops import mask_patterns, registry
from hf_rocm.ops.mask_patterns import recognise
from tests.ops.test_attention import tensors

# 1 marks a real key; two rows of 9 keys.
PADDING = {
    "left": [[0] * 4 + [1] * 5, [1] * 9],
    "right": [[1] * 5 + [0] * 4, [1] * 9],
    "none": [[1] * 9, [1] * 9],
    "gap": [[1, 1, 0, 0, 1, 1, 1, 1, 1], [1] * 9],
    "one": [[0] * 8 + [1], [0] * 3 + [1] * 6],
}


@pytest.fixture(autouse=True)
def kernels_serve(monkeypatch):
    """Simulate kernels for packed sequences and lengths with the torch tier."""
    monkeypatch.setattr(mask_patterns, "_kernel_serves", lambda *_: True)


def causal_mask(real, s_q):
    real = torch.tensor(real, dtype=torch.bool)
    s_k = real.shape[1]
    seen = torch.arange(s_k)[None] <= torch.arange(s_k - s_q, s_k)[:, None]
    return (seen & real[:, None])[:, None]


def qkv(s_q, s_k, b=2):
    return tensors((b, 4, 2, s_q, s_k, 16, 16), torch.float32)


def check(mask, s_q, s_k, **layer):
    """The mask must be recognised. Results must be equal for queries that attend to a key, and zero for others."""
    query, key, value = qkv(s_q, s_k)
    result = recognise(mask, query, key, value, **layer)
    assert result is not None
    with ops.recording() as routes:
        actual, _ = ops.attention(query, key, value, scale=0.25, mask=mask, padded=result)
    assert [route.operation for route in routes] == ["decode_attention" if s_q == 1 else "varlen_attention"]
    expected, _ = ops.attention(query, key, value, scale=0.25, mask=mask)
    seen = mask if mask.dtype == torch.bool else mask == 0
    seeing = seen[:, 0, :, :s_k].any(-1).expand(2, s_q)
    torch.testing.assert_close(actual[seeing], expected[seeing])
    assert torch.equal(actual[~seeing], torch.zeros_like(actual[~seeing]))
    return routes[0]


@pytest.mark.parametrize("s_q", [9, 4])
@pytest.mark.parametrize("padding", ["left", "none", "one"])
def test_a_left_padded_causal_mask_is_recognised(padding, s_q):
    route = check(causal_mask(PADDING[padding], s_q), s_q, 9)
    real = sum(map(sum, PADDING[padding]))
    # Padding keys are removed instead of masked.
    assert route.shapes[1][0] == real


@pytest.mark.parametrize("padding", PADDING)
def test_keys_that_no_query_sees_are_removed(padding):
    real = torch.tensor(PADDING[padding], dtype=torch.bool)
    check(real[:, None, None].expand(2, 1, 6, 9), 6, 9)


@pytest.mark.parametrize("lengths", [(9, 9), (1, 7)])
def test_a_single_query_on_a_partly_filled_cache_is_recognised(lengths):
    check((torch.arange(12)[None] < torch.tensor(lengths)[:, None])[:, None, None], 1, 12)


def test_a_mask_longer_than_the_keys_is_recognised():
    check(torch.ones(1, 1, 1, 15, dtype=torch.bool), 1, 9)
    check(torch.nn.functional.pad(causal_mask([[1] * 9], 9), (0, 6)), 9, 9)


def windowed(real, s_q, window):
    seen = causal_mask(real, s_q)
    positions = torch.arange(seen.shape[3])
    return seen & (positions[None] > positions[-s_q:, None] - window)


@pytest.mark.parametrize("s_q", [9, 4])
@pytest.mark.parametrize("padding", ["left", "none", "one"])
def test_a_sliding_window_is_recognised(padding, s_q):
    mask = windowed(PADDING[padding], s_q, 3)
    check(mask, s_q, 9, window=3)
    # Without the window, the mask can't be recognised.
    assert recognise(mask, *qkv(s_q, 9)) is None
    assert recognise(mask, *qkv(s_q, 9), window=4) is None


def test_a_window_as_wide_as_the_keys_hides_nothing():
    check(causal_mask(PADDING["left"], 9), 9, 9, window=9)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -torch.inf])
def test_an_additive_mask_that_only_hides_keys_is_recognised(hidden):
    mask = torch.zeros(2, 1, 9, 9).masked_fill(~causal_mask(PADDING["left"], 9), hidden)
    check(mask, 9, 9)


def test_a_call_with_sinks_is_not_packed(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(registry, "kernel_serves", lambda *_: True)
    assert recognise(causal_mask(PADDING["left"], 9), *qkv(9, 9), sinks=True) is None
    assert recognise(causal_mask(PADDING["left"], 9), *qkv(9, 9)) is not None
    assert recognise(torch.ones(2, 1, 1, 9, dtype=torch.bool), *qkv(1, 9), sinks=True) is not None


def altered():
    window = causal_mask(PADDING["none"], 9)
    window[:, :, 8, 0] = False
    other_row = causal_mask(PADDING["left"], 9)
    other_row[1, 0, 4, 2] = False
    future = causal_mask(PADDING["none"], 9)
    future[0, 0, 2, 5] = True
    return {
        "one key fewer": window,
        "one element of one row": other_row,
        "one future key": future,
        "right padding, whose queries attend to keys": causal_mask(PADDING["right"], 9),
        "a gap, whose queries attend to keys": causal_mask(PADDING["gap"], 9),
        "a last query that attends to no key": causal_mask([[1] * 9, [0] * 9], 9),
        "one per head": causal_mask(PADDING["left"], 9).expand(2, 4, 9, 9),
        "additive, weighting keys": torch.full((2, 1, 9, 9), -3.0),
    }


@pytest.mark.parametrize("name", altered())
def test_other_masks_are_not_replaced(name):
    assert recognise(altered()[name], *qkv(9, 9)) is None


@pytest.mark.parametrize("real", [[0, 1, 1], [1, 0, 1], [0, 0, 0]])
def test_a_single_query_on_a_cache_not_filled_from_the_front_is_not_recognised(real):
    mask = torch.tensor([real, [1, 1, 1]], dtype=torch.bool)[:, None, None]
    assert recognise(mask, *qkv(1, 3)) is None


def test_a_mask_is_read_once_and_again_after_a_change(monkeypatch):
    mask, arguments = causal_mask(PADDING["left"], 9), qkv(9, 9)
    first = recognise(mask, *arguments)
    monkeypatch.setattr(mask_patterns, "_packed", lambda *_: pytest.fail("read again"))
    assert recognise(mask, *arguments) is first
    monkeypatch.undo()
    monkeypatch.setattr(mask_patterns, "_kernel_serves", lambda *_: True)
    mask[0, 0, 8, 8] = False
    assert recognise(mask, *arguments) is None


def test_masks_without_a_version_or_without_a_kernel_are_not_examined(monkeypatch):
    with torch.inference_mode():
        assert recognise(causal_mask(PADDING["left"], 9), *qkv(9, 9)) is None
    monkeypatch.undo()
    # The torch tier supports masks.
    assert recognise(causal_mask(PADDING["left"], 9), *qkv(9, 9)) is None


def test_gradients_equal_those_with_the_mask():
    query, key, value = (tensor.detach().requires_grad_() for tensor in qkv(9, 9))
    mask = causal_mask(PADDING["left"], 9)
    output = recognise(mask, query, key, value).attend(query, key, value, scale=0.25)
    output.square().sum().backward()
    grads = [tensor.grad.clone() for tensor in (query, key, value)]
    for tensor in (query, key, value):
        tensor.grad = None
    other, _ = ops.attention(query, key, value, scale=0.25, mask=mask)
    other[mask[:, 0].any(-1)].square().sum().backward()
    for actual, tensor in zip(grads, (query, key, value), strict=True):
        torch.testing.assert_close(actual, tensor.grad)
