"""The cache for recorded steps of an encoder-decoder model: a `DecodeCache`, and the encoder's data for the decoder.

The encoder runs once, before the first step. The keys and values of cross-attention are computed from its output in the
prompt's forward and stay at fixed addresses, as does the output itself. The models read them through transformers'
`EncoderDecoderCache`. Here one object is both the `EncoderDecoderCache` and the cache of self-attention.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.static_buffers import settle
from hf_rocm.ops.bits import bits

# Models whose decoders were compared with stock → the attribute of their config with the number of layers.
LAYERS: Mapping[str, str] = {
    "bart": "decoder_layers",
    "mbart": "decoder_layers",
    "whisper": "decoder_layers",
    "t5": "num_decoder_layers",
    "mt5": "num_decoder_layers",
}


class CrossLayer:
    """The keys and values [B, Hkv, S, D] of one layer's cross-attention; None until the prompt's forward."""

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None


class CrossCache(Cache):
    """The keys and values of all layers' cross-attention, in buffers that are written once per call."""

    def __init__(self, layers: int) -> None:
        self.layers: Any = [CrossLayer() for _ in range(layers)]
        # Whether a buffer has been allocated since this flag was last reset.
        self.moved = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        layer.keys = self._written(layer.keys, key_states)
        layer.values = self._written(layer.values, value_states)
        return layer.keys, layer.values

    def _written(self, buffer: Tensor | None, content: Tensor) -> Tensor:
        if buffer is None or not _alike(buffer, content):
            self.moved = True
            with torch.inference_mode(False), torch.no_grad():
                buffer = torch.empty_like(content, memory_format=torch.contiguous_format)
        return buffer.copy_(content)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        keys = self.layers[layer_idx].keys
        return 0 if keys is None else int(keys.shape[2])

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values) if tensor is not None]

    # Read by transformers 4.53

    @property
    def key_cache(self) -> list[Any]:
        return [layer.keys for layer in self.layers]

    @property
    def value_cache(self) -> list[Any]:
        return [layer.values for layer in self.layers]

    def __len__(self) -> int:
        return len(self.layers)


class EncoderDecoderDecodeCache(DecodeCache, EncoderDecoderCache):
    """The caches of self-attention and cross-attention, with the output of the encoder."""

    def __init__(self, windows: Sequence[int | None], *, capacity: int, limit: int) -> None:
        super().__init__(windows, capacity=capacity, limit=limit)
        self.cross_attention_cache = CrossCache(len(windows))
        self.is_updated: dict[int, bool] = {}
        self.encoder_outputs: Any = None
        # The encoder's output that was copied.
        self._source: Any = None
        # Whether the model's attention takes only additive masks.
        self._additive = False
        self._mask: Tensor | None = None  # [B, 1, 1, S], the padding of the encoder's inputs
        self._visible: Tensor | None = None  # [B, 1, 1, capacity] bool, the rows that a step's query attends to
        # The same rows, as the kind of mask that the model takes.
        self._step_mask: Any = None
        self._rows: Any = None  # [B, 1, 1, capacity], the index of every row

    @property
    def self_attention_cache(self) -> EncoderDecoderDecodeCache:
        return self

    # transformers' class forwards these to the cache of self-attention, which is the same object here

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.layers)

    is_dummy = is_linear
    is_croppable = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} layers)"

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(tensor.nbytes for tensor in self.cross_attention_cache.tensors)

    @property
    def encoder_length(self) -> int:
        return 0 if self.encoder_outputs is None else int(self.encoder_outputs[0].shape[1])

    def begin(self, mask: Tensor | None, *, additive: bool) -> None:
        """Prepare for a call.

        mask: the encoder's padding, [B, 1, 1, S] or None. additive: whether attention takes only additive masks.
        """
        if mask is not None and self._mask is not None and _alike(self._mask, mask):
            self._mask.copy_(mask)
        elif mask is not None or self._mask is not None:
            self.recordings.clear()
            with torch.inference_mode(False), torch.no_grad():
                self._mask = None if mask is None else settle(mask.clone())
        self._additive = additive

    def _keep(self, encoder_outputs: Any) -> None:
        """Copy the encoder's output to its fixed address, before the first step of a call."""
        from transformers.modeling_outputs import BaseModelOutput

        state = encoder_outputs[0]
        if self.encoder_outputs is None or not _alike(self.encoder_outputs[0], state):
            self.recordings.clear()
            with torch.inference_mode(False), torch.no_grad():
                self.encoder_outputs = BaseModelOutput(last_hidden_state=settle(torch.empty_like(state)))
        self.encoder_outputs[0].copy_(state)
        self._source = encoder_outputs

    def step_arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a step, with the encoder's output and mask at their fixed addresses."""
        if self.cross_attention_cache.moved:
            self.recordings.clear()
            self.cross_attention_cache.moved = False
        if arguments["encoder_outputs"] is not self._source:
            self._keep(arguments["encoder_outputs"])
        replaced: dict[str, Any] = {"encoder_outputs": self.encoder_outputs}
        # Releases before 5.19 create the mask within the step.
        if arguments.get("decoder_attention_mask") is None:
            replaced["decoder_attention_mask"] = self._written_rows(len(arguments["decoder_input_ids"]))
        if "attention_mask" in arguments or self._mask is not None:
            replaced["attention_mask"] = self._mask
        return {**arguments, **replaced}

    def _written_rows(self, batch: int) -> Tensor:
        """The mask of a step without padding, [B, 1, 1, capacity]: bool, or additive for eager attention."""
        layer = self.layers[0]
        shape = (batch, 1, 1, layer.capacity)
        with torch.inference_mode(False), torch.no_grad():
            if self._visible is None or self._visible.shape != shape or self._visible.device != layer.keys.device:
                self.recordings.clear()
                self._rows = torch.arange(layer.capacity, device=layer.keys.device).expand(shape)
                self._visible = self._step_mask = settle(torch.empty(shape, dtype=torch.bool, device=layer.keys.device))
                if self._additive:
                    self._step_mask = settle(torch.empty(shape, dtype=layer.keys.dtype, device=layer.keys.device))
            torch.le(self._rows, layer.place, out=self._visible)
            if self._additive:
                self._step_mask.zero_().masked_fill_(~self._visible, torch.finfo(layer.keys.dtype).min)
        return self._step_mask

    @property
    def constants(self) -> tuple[object, ...]:
        return (self, self.encoder_outputs)

    def rows_of_beams(self, *, rounded: bool = False) -> list[Tensor]:
        return [*super().rows_of_beams(rounded=rounded), *self.cross_attention_cache.tensors]

    def digest(self, without: int) -> Tensor:
        cross = [bits(tensor).sum(dtype=torch.int64) for tensor in self.cross_attention_cache.tensors]
        return torch.cat((super().digest(without), torch.stack(cross)))

    def fresh(self) -> DecodeCache:
        cache = super().fresh()
        assert isinstance(cache, EncoderDecoderDecodeCache)
        cache.begin(self._mask, additive=self._additive)
        return cache

    def reset(self) -> None:
        super().reset()
        self.is_updated = {}
        self._source = None


def windows_of(config: Any) -> list[int | None] | str:
    """The windows of the decoder's layers, or why this model's decoder isn't supported."""
    layers = LAYERS.get(config.model_type)
    if layers is None:
        return f"the steps of encoder-decoder models of type {config.model_type} are not recorded"
    windows: list[int | None] = [None] * getattr(config, layers)
    return windows


def mask_of(model: Any, attention_mask: Tensor | None, encoder_outputs: Any) -> Tensor | str | None:
    """The mask of the encoder's padding for every step of a call, or None if the steps take no mask.

    Returns a string, the reason, if the steps of the call can't be recorded.

    From 5.0 on, decoders take a four-dimensional mask. They omit a mask without padding, but not while a step is
    recorded, so a mask is always passed. Earlier releases take a two-dimensional mask and wait for the device in every
    step unless it is None, so the inputs must not be padded in these releases.
    """
    create_mask = getattr(sys.modules[type(model).__module__], "create_bidirectional_mask", None)
    if create_mask is None:
        padded = attention_mask is not None and attention_mask.ndim == 2 and bool((attention_mask == 0).any())
        return "the inputs of the encoder are padded" if padded else None
    state = encoder_outputs[0]
    shape = (len(state), 1, 1, state.shape[1])
    if attention_mask is not None and attention_mask.ndim == 2:
        query = torch.empty((len(state), 1, 0), dtype=state.dtype, device=state.device)
        # Pass the arguments by position, because releases differ in the second parameter's name.
        mask = create_mask(model.config, query, attention_mask, state)
        if mask is not None:
            fits = isinstance(mask, Tensor) and mask.shape == shape
            return mask if fits else "the mask of the encoder's padding has an unexpected shape"
    if model.config._attn_implementation == "eager":
        return torch.zeros(shape, dtype=state.dtype, device=state.device)
    return torch.ones(shape, dtype=torch.bool, device=state.device)


def _alike(one: Tensor, two: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
