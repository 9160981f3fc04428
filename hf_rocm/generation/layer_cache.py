"""The base class of caches of recorded steps: the properties that transformers reads from every cache with layers."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache

from hf_rocm.generation.cache_layer import Layer


class LayerCache(Cache):
    """A transformers `Cache` whose properties follow from its layers.

    layers: one for every layer of the decoder. attending: those with keys and values.
    """

    layers: Any
    attending: list[Layer]

    @property
    def length(self) -> int:
        """The number of tokens seen so far."""
        return self.attending[-1].length

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.attending)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.window is not None for layer in self.layers]

    @property
    def is_initialized(self) -> bool:
        return self.attending[0].keys is not None

    @property
    def max_batch_size(self) -> int:
        keys = self.attending[0].keys
        return -1 if keys is None else len(keys)

    batch_size = max_batch_size

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        raise NotImplementedError

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.get_max_cache_shape(layer_idx or 0)

    @property
    def max_cache_len(self) -> int:
        return self.get_max_cache_shape()
