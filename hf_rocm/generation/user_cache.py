"""The transformers cache that a call receives or returns, although its steps use a `DecodeCache`.

The keys and values of the cache are copied to the `DecodeCache` when the call begins. When the call ends, the new ones
are written back with the cache's own `update`. So the user's object has the type, the contents and the length that it
would have without hf_rocm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_rocm import features
from hf_rocm.generation.cache import DecodeCache

# Cache implementations whose layers a `DecodeCache` can represent. Most others move or quantise their tensors.
NAMED = ("static", "sliding_window", "hybrid", "dynamic", "dynamic_full")

_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")


class UserCache:
    """A transformers cache. passed: whether the call passed it; otherwise it was created for the result."""

    def __init__(self, cache: Any, *, passed: bool) -> None:
        self.cache = cache
        self.passed = passed
        # The number of tokens in every layer.
        self._seen: list[int] = []

    def refuses(self) -> str | None:
        """Return why the steps of this call can't use a `DecodeCache`, or None."""
        inner = self._self_attention()
        if inner is not self.cache and self.passed:
            return "the call passes the cache of an encoder-decoder model"
        return refuses(inner)

    def windows(self, windows: Sequence[int | None]) -> Sequence[int | None] | str:
        """The window of every layer, or why the cache does not match the model."""
        return windows_of(self._self_attention(), windows)

    @property
    def length(self) -> int:
        """The number of tokens that the cache has seen. May wait for the device."""
        return int(self.cache.get_seq_length())

    def _self_attention(self) -> Any:
        """The cache of self-attention; an encoder-decoder model has a second cache."""
        from transformers import EncoderDecoderCache

        return self.cache.self_attention_cache if type(self.cache) is EncoderDecoderCache else self.cache

    def load(self, cache: DecodeCache) -> None:
        """Copy the keys and values to an empty `DecodeCache`, which represents this cache from now on."""
        self._seen = [0] * len(cache.layers)
        for index in range(len(cache.layers)):
            content = _content(self._self_attention(), index)
            if content is not None:
                keys, values, self._seen[index] = content
                cache.load(index, keys, values, seen=self._seen[index])
        cache.stand_for(self)

    def store(self, cache: Any) -> None:
        """Write the keys and values of the tokens since `load` to the user's cache."""
        cache.stand_for(None)
        for index, layer in enumerate(cache.layers):
            count = layer.length - self._seen[index]
            if count <= 0:
                continue
            rows = min(count, layer.rows)
            keys, values = (buffer[:, :, layer.rows - rows : layer.rows] for buffer in (layer.keys, layer.values))
            # Later queries do not attend to tokens whose rows were overwritten, so only their number matters.
            if count > rows:
                first = (part[:, :, :1].expand(-1, -1, count - rows, -1) for part in (keys, values))
                self._update(index, *first)
            self._update(index, keys, values)
        if self._self_attention() is not self.cache:
            for index, layer in enumerate(cache.cross_attention_cache.layers):
                if cache.is_updated.get(index):
                    self.cache.cross_attention_cache.update(layer.keys.clone(), layer.values.clone(), index)
                    self.cache.is_updated[index] = True

    def _update(self, index: int, keys: Tensor, values: Tensor) -> None:
        first = self._seen[index]
        self._seen[index] += keys.shape[2]
        places = torch.arange(first, self._seen[index], device=keys.device)
        inner = self._self_attention()
        if not first and _stores_first_tensors():
            keys, values = keys.clone(), values.clone()
        inner.update(keys, values, index, {"cache_position": places})


def _stores_first_tensors() -> bool:
    """Whether a dynamic cache of transformers stores the tensors of its first update, not a copy: before 4.56."""
    from transformers import cache_utils

    return not hasattr(getattr(cache_utils, "DynamicLayer", None), "lazy_initialization")


def store(result: Any, cache: DecodeCache) -> Any:
    """Write the new keys and values to the cache that the user passed or receives, and add that cache to the result.

    result: what `generate` returns, or None after an error. Returns the result.
    """
    user = cache.user
    if user is not None:
        user.store(cache)
        if result is not None and not isinstance(result, Tensor):
            result.past_key_values = user.cache
    return result


def refuses(cache: Any) -> str | None:
    """Return why the steps of a call with this cache can't use a `DecodeCache`, or None."""
    from transformers import DynamicCache, StaticCache

    if type(cache) not in (DynamicCache, StaticCache):
        return f"the call uses a cache of type {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "the call uses an offloaded cache"
    for layer in getattr(cache, "layers", ()):
        if type(layer).__name__ not in _LAYERS or type(layer).__module__ != "transformers.cache_utils":
            return f"the call uses a cache with a layer of type {type(layer).__name__}"
        if getattr(layer, "record_past", False):
            return "the call uses a cache that records its past"
    return features.refuses("user_caches")


def windows_of(cache: Any, windows: Sequence[int | None]) -> Sequence[int | None] | str:
    """The window of every layer of a cache that was not refused, or why the cache does not match the model.

    windows: the windows of the model. A layer of the user's cache that keeps all keys has no window.
    """
    layers = getattr(cache, "layers", None)
    if not layers:
        # The first update creates the layers, which keep all keys.
        return [None] * len(windows)
    # Whisper's cache may have more layers than its decoder.
    if len(layers) < len(windows):
        return f"the call uses a cache of {len(layers)} layers, but the model has {len(windows)}"
    sizes: list[int | None] = []
    for layer, window in zip(layers, windows, strict=False):
        if not layer.is_sliding:
            sizes.append(None)
            continue
        # A static layer has no `sliding_window`, and may be smaller than the window.
        exact: int | None = getattr(layer, "sliding_window", None)
        if window is None or (layer.max_cache_len > window if exact is None else exact != window):
            return "the call uses a cache whose sliding windows differ from the model's"
        sizes.append(window)
    return sizes


def observers(call: Mapping[str, Any]) -> str | None:
    """Return the name of a user's class that may read the cache during a call with these arguments, or None."""
    pieces = [call.get("streamer"), *(call.get("logits_processor") or ()), *(call.get("stopping_criteria") or ())]
    pieces.append(call.get("prefix_allowed_tokens_fn"))
    for piece in pieces:
        kind = type(piece)
        if piece is not None and kind.__module__.split(".")[0] not in ("transformers", "hf_rocm"):
            return kind.__name__
    return None


def _content(cache: Any, index: int) -> tuple[Tensor, Tensor, int] | None:
    """Return (keys, values, the number of tokens seen) of one layer of the user's cache; None if the layer is empty."""
    layers = getattr(cache, "layers", None)
    if len(cache.key_cache if layers is None else layers) <= index:
        return None
    if layers is None:
        keys, values = cache.key_cache[index], cache.value_cache[index]
    else:
        keys, values = layers[index].keys, layers[index].values
    seen = 0 if keys is None or not keys.numel() else int(cache.get_seq_length(index))
    if not seen:
        return None
    # A static layer has rows that are not written yet.
    rows = min(seen, keys.shape[2])
    return keys[:, :, :rows], values[:, :, :rows], seen


def cache_of_forward(model: Any) -> Any:
    """Return a new cache like the one that the model's forward creates in releases where `generate` creates none."""
    from transformers import DynamicCache, EncoderDecoderCache

    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(*(DynamicCache(config=model.get_decoder().config) for _ in range(2)))
    return DynamicCache(config=model.config.get_text_config(decoder=True))
