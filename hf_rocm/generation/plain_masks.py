"""Masks without `vmap`, for prepared models, in the releases that build theirs with it (up to 4.57).

There a mask costs 2 ms of the host's time at every step that makes one; the same functions evaluated over broadcast
indices give the same mask in a tenth of it, as transformers itself does from 5.0 on. Models that were not prepared get
theirs from transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hf_rocm.generation import features

_MODULE = "transformers.masking_utils"

Mask = Callable[..., Tensor | None]


def switch_on(model: nn.Module) -> str | None:
    """Make this model's masks without vmap from here on. Returns why not, or None; from 5.0 on that is all."""
    masking_utils = _stock()
    if not hasattr(masking_utils, "sdpa_mask_recent_torch"):
        return None
    reason = features.refuses("plain_masks")
    if reason is not None:
        return reason
    interface = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    interface["sdpa"], interface["eager"] = _sdpa, _eager
    for config in _configs(model):
        _marked[id(config)] = weakref.ref(config, partial(_forget, id(config)))
    return None


def switch_off(model: nn.Module) -> None:
    """Leave the model's masks to transformers again."""
    for config in _configs(model):
        _marked.pop(id(config), None)


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            yield config


def _sdpa(*args: Any, **kwargs: Any) -> Tensor | None:
    """In place of `sdpa_mask`."""
    if not _ours("sdpa", args, kwargs):
        return _theirs("sdpa")(*args, **kwargs)
    return _seen(**kwargs)


def _eager(*args: Any, **kwargs: Any) -> Tensor | None:
    """In place of `eager_mask`: additive, and never left out."""
    if not _ours("eager", args, kwargs):
        return _theirs("eager")(*args, **kwargs)
    dtype = kwargs.pop("dtype", torch.float32)
    seen = _seen(**{**kwargs, "allow_is_causal_skip": False})
    assert seen is not None
    return torch.where(seen, torch.tensor(0.0, device=seen.device, dtype=dtype), torch.finfo(dtype).min)


def _seen(
    *,
    batch_size: int,
    cache_position: Tensor,
    kv_length: int,
    kv_offset: Any = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Tensor | None:
    """[B, 1, S_q, S_k] bool, or None where SDPA needs no mask."""
    stock = _stock()
    s_q = cache_position.shape[0]
    padding = stock.prepare_padding_mask(attention_mask, kv_length, kv_offset, _slice=False)
    if allow_is_causal_skip and stock._ignore_causal_mask_sdpa(padding, s_q, kv_length, kv_offset, local_size):
        return None
    sees = stock.causal_mask_function if mask_function is None else mask_function
    if padding is not None:
        sees = stock.and_masks(sees, stock.padding_mask_function(padding))
    rows = torch.arange(batch_size, device=cache_position.device)[:, None, None, None]
    keys = torch.arange(kv_length, device=cache_position.device) + kv_offset
    seen: Tensor = sees(
        rows, torch.zeros_like(rows[:1]), cache_position[None, None, :, None], keys[None, None, None, :]
    )
    return seen.expand(batch_size, 1, s_q, kv_length)


def _ours(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is for a prepared model, and its mask made of nothing but transformers' own functions."""
    if is_compiling():  # what is compiled is another's business
        return False
    held = _marked.get(id(kwargs.get("config")))
    if args or held is None or held() is not kwargs["config"]:
        return False
    stocks = _stock().sdpa_mask_recent_torch if name == "sdpa" else _stock().eager_mask
    function = kwargs.get("mask_function")
    return _theirs(name) is stocks and (function is None or _is_stock(function))


def _is_stock(function: Any) -> bool:
    """Whether a mask function, and every function that it is put together from, is transformers' own."""
    if getattr(function, "__module__", None) != _MODULE:
        return False
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [each for value in held for each in (value if isinstance(value, tuple) else (value,))]
    return all(_is_stock(each) for each in inner if callable(each) and not isinstance(each, Tensor))


def _theirs(name: str) -> Mask:
    found: Mask = _stock().ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]
    return found


def _stock() -> Any:
    """Its module, whose functions are others in other releases."""
    from transformers import masking_utils

    return masking_utils


def _forget(key: int, config: weakref.ref[Any]) -> None:
    if _marked.get(key) is config:  # and not another config in the same place
        del _marked[key]


# By id, since configs can't be hashed.
_marked: dict[int, weakref.ref[Any]] = {}
