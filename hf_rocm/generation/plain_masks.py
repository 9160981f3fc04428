"""Masks for prepared models, built without `vmap` in the releases that build masks with it (up to 4.57).

In these releases, building a mask takes 2 ms on the host. The same functions evaluated over broadcast indices give the
same mask in a tenth of the time, as in transformers from 5.0 on. Models that are not prepared get transformers' masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hf_rocm import features, patches
from hf_rocm.patches import ABSENT, Change, Entry

_MODULE = "transformers.masking_utils"

Mask = Callable[..., Tensor | None]


def switch_on(model: nn.Module) -> str | None:
    """Build the masks of this model without vmap from now on. Returns the reason if this is not possible, else None.

    From 5.0 on, transformers needs no replacement, and this function does nothing.
    """
    masking_utils = _stock()
    if not hasattr(masking_utils, "sdpa_mask_recent_torch"):
        return None
    reason = features.refuses("plain_masks")
    if reason is not None:
        return reason
    table = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    _marked[model] = {id(config): config for config in _configs(model)}
    masks = (Entry(table, name, make, key=__name__) for name, make in (("sdpa", _sdpa), ("eager", _eager)))
    patches.apply(*masks, user=model)
    return None


def switch_off(model: nn.Module) -> None:
    """Let transformers build the masks of this model again."""
    _marked.pop(model, None)
    patches.release(model, key=__name__)


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            yield config


def _sdpa(change: Change) -> Mask:
    """Replaces `sdpa_mask`."""

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return _seen(**kwargs) if _applies(change, args, kwargs) else _inherited(change)(*args, **kwargs)

    return mask


def _eager(change: Change) -> Mask:
    """Replaces `eager_mask`. The mask is additive, and never None."""

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        if not _applies(change, args, kwargs):
            return _inherited(change)(*args, **kwargs)
        dtype = kwargs.pop("dtype", torch.float32)
        seen = _seen(**{**kwargs, "allow_is_causal_skip": False})
        assert seen is not None
        return torch.where(seen, torch.tensor(0.0, device=seen.device, dtype=dtype), torch.finfo(dtype).min)

    return mask


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
    """Which keys each query attends to, [B, 1, S_q, S_k] bool, or None if SDPA needs no mask."""
    stock = _stock()
    s_q = cache_position.shape[0]
    padding = stock.prepare_padding_mask(attention_mask, kv_length, kv_offset, _slice=False)
    if allow_is_causal_skip and stock._ignore_causal_mask_sdpa(padding, s_q, kv_length, kv_offset, local_size):
        return None
    combined = stock.causal_mask_function if mask_function is None else mask_function
    if padding is not None:
        combined = stock.and_masks(combined, stock.padding_mask_function(padding))
    rows = torch.arange(batch_size, device=cache_position.device)[:, None, None, None]
    keys = torch.arange(kv_length, device=cache_position.device) + kv_offset
    seen: Tensor = combined(
        rows, torch.zeros_like(rows[:1]), cache_position[None, None, :, None], keys[None, None, None, :]
    )
    return seen.expand(batch_size, 1, s_q, kv_length)


def _applies(change: Change, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is for a prepared model, with a mask that is composed only of transformers' own functions.

    False while a compiler traces, for positional arguments, and if another tool has replaced the entry.
    """
    config = kwargs.get("config")
    # Compiled code keeps transformers' functions.
    if is_compiling() or args or config is None or not change.live:
        return False
    if not any(id(config) in configs for configs in _marked.values()):
        return False
    expected = _stock().sdpa_mask_recent_torch if change.name == "sdpa" else _stock().eager_mask
    function = kwargs.get("mask_function")
    return _inherited(change) is expected and (function is None or _is_stock(function))


def _is_stock(function: Any) -> bool:
    """Return whether a mask function, and every function that it is composed of, is transformers' own."""
    if getattr(function, "__module__", None) != _MODULE:
        return False
    contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [part for value in contents for part in (value if isinstance(value, tuple) else (value,))]
    return all(_is_stock(part) for part in inner if callable(part) and not isinstance(part, Tensor))


def _inherited(change: Change) -> Mask:
    """The entry without this change: in this table, or in the mapping that all tables of this type share."""
    shared = _stock().ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    mask: Mask = shared[change.name] if change.original is ABSENT else change.original
    return mask


def _stock() -> Any:
    """The module of transformers' masks, whose functions differ between releases."""
    from transformers import masking_utils

    return masking_utils


# The configs of prepared models, by id, because configs are not hashable.
_marked: WeakKeyDictionary[nn.Module, dict[int, Any]] = WeakKeyDictionary()
