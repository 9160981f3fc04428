"""The cache of recorded steps for models whose layers have attention or a recurrent state (the gated delta rule).

A recurrent layer keeps two states of fixed size, which every step updates in place, at fixed addresses. A step can't be
undone by reducing the length, so the states are copied before a step that has to run twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_rocm import features
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.layers.release import before

# Used instead of a layer's window: the layer has a recurrent state and no keys.
RECURRENT = 0

# The `model_type` of every text config whose model's layers were compared with stock.
MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class HybridDecodeCache(DecodeCache):
    """A `DecodeCache` whose layers with the window `RECURRENT` are transformers' own `LinearAttentionLayer`."""

    def __init__(self, windows: Sequence[int | None], *, capacity: int, limit: int) -> None:
        from transformers import cache_utils

        super().__init__([window for window in windows if window != RECURRENT], capacity=capacity, limit=limit)
        self.windows = tuple(windows)
        attending = iter(self.attending)
        recurrent: Any = getattr(cache_utils, "LinearAttentionLayer", None)
        self.layers = [recurrent() if window == RECURRENT else next(attending) for window in windows]
        # The states of all recurrent layers.
        self._states: dict[tuple[int, str], Tensor] = {}
        self._copies: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(state.nbytes for state in self._states.values())

    @property
    def steady(self) -> int:
        """0, because earlier steps can't be recomputed without the states before them."""
        return 0

    def keep_states(self) -> None:
        self._copies = [state.clone() for state in self._states.values()]

    def drop_states(self) -> None:
        self._copies = []

    def rewind(self) -> None:
        super().rewind()
        self._restore(self._copies)

    def written(self, tokens: int) -> list[Tensor]:
        return [*super().written(tokens), *(state.clone() for state in self._states.values())]

    @contextmanager
    def being_recorded(self) -> Iterator[None]:
        """Restore the states at the end of the block, because recording may run the step again."""
        states = [state.clone() for state in self._states.values()]
        with super().being_recorded():
            try:
                yield
            finally:
                self._restore(states)

    def _restore(self, copies: Sequence[Tensor]) -> None:
        for state, copy in zip(self._states.values(), copies, strict=bool(copies)):
            state.copy_(copy)

    # Called by transformers

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        taps = kwargs.get("conv_kernel_size", conv_states.shape[-1])
        like = conv_states.new_empty(()).expand(*conv_states.shape[:-1], taps)
        self._allocate(layer_idx, "conv_states", like, conv_kernel_size=taps)
        result: Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        return result

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._allocate(layer_idx, "recurrent_states", recurrent_states)
        result: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        return result

    def _allocate(self, index: int, name: str, like: Tensor, **terms: Any) -> None:
        """Allocate a state with the shape, dtype and device of this tensor, unless the layer already has one."""
        state = self._states.get((index, name))
        if state is None or (state.shape, state.dtype, state.device) != (like.shape, like.dtype, like.device):
            self.recordings.clear()
            layer = self.layers[index]
            # inference tensors can't be written outside inference mode
            with torch.inference_mode(False), torch.no_grad():
                layer.lazy_initialization(**{name: torch.empty_like(like)}, **terms)
            self._states[index, name] = getattr(layer, name)[0]

    def reset(self) -> None:
        super().reset()
        self.drop_states()
        for layer, window in zip(self.layers, self.windows, strict=True):
            if window == RECURRENT:
                layer.reset()

    def rows_of_beams(self, *, rounded: bool = False) -> list[Tensor]:
        return [*super().rows_of_beams(rounded=rounded), *self._states.values()]

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for (index, name), state in self._states.items():
            self._states[index, name] = state.index_select(0, indices.to(state.device))
            getattr(self.layers[index], name)[0] = self._states[index, name]

    @property
    def is_sliding(self) -> list[Any]:
        """None for recurrent layers, because transformers takes mask sizes from the first layer with False."""
        return [None if window == RECURRENT else window is not None for window in self.windows]


def refuses(config: Any) -> str | None:
    """Return why steps over the recurrent states of a model are not recorded, or None.

    config: the config of the text model.
    """
    if config.model_type not in MODELS:
        return f"the recurrent states of {config.model_type} are not recorded"
    if before("5.16"):
        return "before transformers 5.16, its recurrent states have a different layout"
    return features.refuses("recurrent_states")
