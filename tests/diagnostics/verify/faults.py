"""Faults that kernels and weights have had, planted where hf_rocm alone runs into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hf_rocm
from hf_rocm import ops
from hf_rocm.ops.attention_eager import attention as softmax
from hf_rocm.ops.rope import eager_rope
from hf_rocm.weights import fuse

Planted = Callable[[Any], Any]


@contextmanager
def instead(operation: str, call: Callable[..., Any]) -> Iterator[None]:
    """Every call of the operation goes to `call`, in hf_rocm's path alone."""
    remove = ops.register(operation, name="planted", call=call, refuses=lambda spec, device: None, check=False)
    try:
        yield
    finally:
        remove()


def top_left(query, key, value, *, mask, **terms):
    """A causal mask aligned at the first key: a query on a filled cache sees too little."""
    s_q, s_k = query.shape[2], key.shape[2]
    seen = torch.ones(s_q, s_k, dtype=torch.bool, device=query.device).tril()
    mask = None if s_q == s_k else torch.where(seen, 0.0, torch.finfo(query.dtype).min).to(query.dtype)[None, None]
    return softmax(query, key, value, mask=mask, **{**terms, "causal": s_q == s_k})


def one_key_less(query, key, value, *, mask, **terms):
    """A window off by one: where some key is hidden behind a query, the oldest that it sees is, too."""
    s_k = key.shape[2]
    places = torch.arange(s_k, device=query.device)
    if mask is None:
        return softmax(query, key, value, mask=None, **terms)
    seen = mask[..., :s_k] if mask.dtype == torch.bool else mask[..., :s_k] == 0
    oldest = torch.where(seen, places, s_k).amin(-1, keepdim=True)
    return softmax(query, key, value, mask=seen & ~((places == oldest) & (oldest > 0)), **terms)


def without(term: str) -> Callable[..., Any]:
    def call(query, key, value, **terms):
        return softmax(query, key, value, **{**terms, term: None})

    return call


def first_rows_positions(query, key, cos, sin, interleaved):
    return eager_rope(query, key, cos[:1], sin[:1], interleaved)


def wrong_block(model: Any, path: str) -> None:
    """A fused block whose bytes are not those of its layers."""
    module = model.get_submodule(path)
    with torch.no_grad():
        held = fuse.fused(module)
        held.weight = held.weight.clone()
        held.weight[-1] += 0.5


def stale_block(model: Any, path: str, monkeypatch: Any) -> None:
    """A layer's weight is replaced, and the block is used as if nothing had happened."""
    module = model.get_submodule(path)
    with torch.no_grad():
        held = fuse.fused(module)
        first = module._modules[held.names[0]]
        first.weight = torch.nn.Parameter(first.weight + 0.25 * torch.randn_like(first.weight))
    honest = fuse.fused
    monkeypatch.setattr(fuse, "fused", lambda each: held if each is module else honest(each))


def prepared(model: Any) -> Any:
    return hf_rocm.prepare(model, force=True)
