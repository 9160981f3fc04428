"""Faults like those of real kernels and weights, injected into hf_rocm's path or into stock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hf_rocm
from hf_rocm import ops
from hf_rocm.layers import grouped_linear
from hf_rocm.ops.attention_eager import attention as softmax
from hf_rocm.ops.pointwise import eager_rope


@contextmanager
def replaced(operation: str, call: Callable[..., Any]) -> Iterator[None]:
    """Replace an operation with `call`, only in hf_rocm's path."""
    remove = ops.register(operation, name="planted", call=call, refuses=lambda spec, device: None, check=False)
    try:
        yield
    finally:
        remove()


def top_left(query, key, value, *, mask, **terms):
    """Align the causal mask with the first key, so that a query on a filled cache attends to too few keys."""
    s_q, s_k = query.shape[2], key.shape[2]
    seen = torch.ones(s_q, s_k, dtype=torch.bool, device=query.device).tril()
    mask = None if s_q == s_k else torch.where(seen, 0.0, torch.finfo(query.dtype).min).to(query.dtype)[None, None]
    return softmax(query, key, value, mask=mask, **{**terms, "causal": s_q == s_k})


def one_key_fewer(query, key, value, *, mask, **terms):
    """Hide the oldest visible key unless it is the first key, as if the window were one key too small."""
    s_k = key.shape[2]
    positions = torch.arange(s_k, device=query.device)
    if mask is None:
        return softmax(query, key, value, mask=None, **terms)
    seen = mask[..., :s_k] if mask.dtype == torch.bool else mask[..., :s_k] == 0
    oldest = torch.where(seen, positions, s_k).amin(-1, keepdim=True)
    return softmax(query, key, value, mask=seen & ~((positions == oldest) & (oldest > 0)), **terms)


def without(term: str) -> Callable[..., Any]:
    def call(query, key, value, **terms):
        return softmax(query, key, value, **{**terms, term: None})

    return call


def first_rows_positions(query, key, cos, sin, interleaved):
    return eager_rope(query, key, cos[:1], sin[:1], interleaved)


def wrong_block(model: Any, path: str) -> None:
    """Make a fused block differ from the weights of its layers."""
    module = model.get_submodule(path)
    with torch.no_grad():
        block = grouped_linear.live(module)
        block.weight = block.weight.clone()
        block.weight[-1] += 0.5


def stale_block(model: Any, path: str, monkeypatch: Any) -> None:
    """Replace a layer's weight, but keep using the old fused block."""
    module = model.get_submodule(path)
    with torch.no_grad():
        block = grouped_linear.live(module)
        first = module._modules[block.names[0]]
        first.weight = torch.nn.Parameter(first.weight + 0.25 * torch.randn_like(first.weight))
    original = grouped_linear.live
    monkeypatch.setattr(grouped_linear, "live", lambda value: block if value is module else original(value))


def prepared(model: Any) -> Any:
    return hf_rocm.prepare(model, force=True)


def rotary_of_the_first_row(original: Callable[..., Any]) -> Callable[..., Any]:
    """A rotary function that uses the first row's positions for every row, as a Hub kernel does."""

    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        return original(q, k, cos[:1], sin[:1], *args, **kwargs)

    return apply_rotary_pos_emb


def nan_without_visible_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """An SDPA backend that divides by an empty sum."""

    def scaled_dot_product_attention(query, key, value, attn_mask=None, **kwargs):
        output = original(query, key, value, attn_mask=attn_mask, **kwargs)
        if attn_mask is None:
            return output
        seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask > torch.finfo(attn_mask.dtype).min
        return output.masked_fill(~seen.any(-1, keepdim=True), float("nan"))

    return scaled_dot_product_attention


def attention_without_sinks(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """A flash attention interface that does not pass `s_aux` to its kernel."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    return (scores.float().softmax(-1).to(value.dtype) @ value).transpose(1, 2).contiguous(), None
