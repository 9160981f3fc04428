"""Pad calls on the right to a few bucket lengths, so that calls of many lengths share a few recordings.

In a bidirectional encoder whose positions are counted from the left, a masked token does not change the results of
other tokens. So a call with [B, S] tokens can be padded to [B, bucket] tokens, with the last ones masked and removed
from the outputs. `features` lists the classes for which this was verified. The results equal those of the unpadded
forward except for rounding, because other kernels may run. When a replay is compared with an uncaptured forward, the
unpadded forward runs too, and its result is returned. `prompts` pads the prompts of models that generate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm import features, options
from hf_rocm.forwards.outputs import Outputs
from hf_rocm.generation.step import Unrecordable

# Calls of up to `_LONG` tokens per row are padded to multiples of the first number, and longer ones to multiples of the
# second. GEMMs and attention compute tiles of 32 to 128 rows, so a finer step saves little; a coarser one doubles the
# work for short rows. 12 buckets cover 512 tokens.
_STEPS = (32, 64)
_LONG = 256

# Arguments of shape [B, S] or [1, S] (the mask: only [B, S]) → the value with which they are padded.
_TOKENS = {"attention_mask": 0, "token_type_ids": 0, "position_ids": 0}
_FLAGS = ("return_dict", "output_hidden_states", "output_attentions")


class Padding(NamedTuple):
    """How calls of one kind of model are padded.

    refuses_model(model): why its calls are not padded in its current state, or None. pad(model, stock, args, kwargs):
    the padded form of a call, or None if the call is not padded. roundings: the largest allowed difference between a
    padded and an unpadded forward, as a root mean square, in rounding steps of an output's magnitude (the same mean,
    but at least `least`), for a model with one layer. The limit grows with the square root of the number of layers,
    because their rounding errors add up like independent errors.
    """

    refuses_model: Callable[[Any], str | None]
    pad: Callable[[Any, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Padded | None]
    roundings: int
    least: float

    def differs(self, model: Any, padded: Sequence[Tensor], whole: Sequence[Tensor]) -> str | None:
        """Return why the results of a padded and an unpadded forward differ by more than rounding, or None."""
        layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
        for one, other in zip(padded, whole, strict=True):
            if not other.is_floating_point():
                if not torch.equal(one, other):
                    return "a padded forward and the unpadded one returned different integers"
                continue
            difference = float((one.float() - other.float()).square().mean().sqrt())
            magnitude = max(self.least, float(other.float().square().mean().sqrt()))
            allowed = self.roundings * torch.finfo(other.dtype).eps * math.sqrt(layers) * magnitude
            if not difference <= allowed:
                return (
                    f"a padded forward differed from the unpadded one by {difference:.3g}; "
                    f"rounding explains at most {allowed:.3g}"
                )
        return None


class Padded(NamedTuple):
    """A padded call.

    arguments: all arguments of the padded forward, by name. holds(): whether the values of the arguments allow this
    form; it waits for the device.
    """

    length: int
    bucket: int
    arguments: dict[str, Any]
    holds: Callable[[], bool]

    def cuts(self, whole: Outputs, padded: Outputs) -> list[tuple[int, ...]]:
        """Return, for every tensor of the padded output, the dimensions to cut to the call's length.

        whole: the output of the unpadded call. Raises `Unrecordable` if the two don't correspond.
        """
        if len(whole.tensors) != len(padded.tensors):
            raise Unrecordable("its padded output contains different tensors")
        cuts = []
        for one, other in zip(whole.tensors, padded.tensors, strict=True):
            if one.dim() != other.dim() or one.dtype != other.dtype:
                raise Unrecordable("its padded output contains different tensors")
            different = [index for index in range(one.dim()) if one.shape[index] != other.shape[index]]
            if any((one.shape[index], other.shape[index]) != (self.length, self.bucket) for index in different):
                raise Unrecordable("a shape of its output depends on the length in an unsupported way")
            cuts.append(tuple(different))
        return cuts

    def cut(self, tensors: Sequence[Tensor], cuts: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the tensors of a padded output without the padding, as views."""
        results = []
        for tensor, dimensions in zip(tensors, cuts, strict=True):
            for dimension in dimensions:
                tensor = tensor.narrow(dimension, 0, self.length)
            results.append(tensor)
        return results


def bucket_of(length: int) -> int:
    """Return the length to which a call of this length is padded."""
    step = _STEPS[0] if length <= _LONG else _STEPS[1]
    return math.ceil(length / step) * step


def window_of(model: Any) -> int | None:
    """Return how far this model's local attention reaches to either side, in tokens; None without local attention."""
    local = getattr(model.config, "local_attention", None)
    return None if local is None else local // 2


def refuses_model(model: Any) -> str | None:
    """Return why the calls of this model are not padded in its current state, or None."""
    feature = features.padding_of(type(model))
    if feature is None:
        return f"{type(model).__name__} is not among the encoders whose calls are padded"
    config = model.config
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "the model is a decoder"
    if getattr(config, "chunk_size_feed_forward", 0):
        return "the model's feed-forward layers process their input in chunks"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"the attention implementation {config._attn_implementation!r} may treat masked tokens differently"
    return features.refuses(feature)


def pad(model: Any, stock: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Padded | None:
    """Return the padded form of a call, or None if the call is not padded.

    A call is not padded if it has no `input_ids` of shape [B, S], if its length is that of a bucket, if the padded call
    would exceed `pad_tokens` or the model's positions, or if it has arguments other than `input_ids`, those in
    `_TOKENS` with the shapes listed there, and those in `_FLAGS`.
    """
    limit = options.current().pad_tokens
    arguments = {**dict(zip(_names(getattr(stock, "__func__", stock)), args, strict=False)), **kwargs}
    ids = arguments.get("input_ids")
    if ids is None or not _is_tokens(ids):
        return None
    rows, length = ids.shape
    bucket = bucket_of(length)
    if bucket == length or rows * bucket > limit or bucket > model.config.max_position_embeddings:
        return None
    mask = arguments.get("attention_mask")
    result = {**arguments, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    for name, value in result.items():
        if name == "input_ids":
            result[name] = extended(value, bucket, getattr(model.get_input_embeddings(), "padding_idx", None) or 0)
        elif name in _TOKENS and value is not None:
            shapes = (ids.shape,) if name == "attention_mask" else (ids.shape, (1, length))
            if not _is_tokens(value) or value.shape not in shapes:
                return None
            result[name] = extended(value, bucket, _TOKENS[name])
        elif value is not None and not (name in _FLAGS and isinstance(value, bool)):
            return None
    seen = partial(_every_position_attends, result["attention_mask"][:, :length], window_of(model))
    return Padded(length, bucket, result, seen)


def _every_position_attends(mask: Tensor, window: int | None) -> bool:
    """Return whether every position can attend to an unmasked token.

    The result of attention without a visible key depends on the length. mask: [B, S]. window: see `window_of`.
    """
    mask = mask > 0
    seen = mask.any(-1)
    if window is not None:
        near = functional.max_pool1d(mask[:, None].float(), 2 * window + 1, stride=1, padding=window)
        seen = seen & (near > 0).all(-1)[:, 0]
    return bool(seen.all())


# How encoders are padded.
ENCODERS = Padding(refuses_model, pad, roundings=4, least=1.0)


@lru_cache(maxsize=64)
def _names(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a forward's arguments, without `self`."""
    return [name for name in inspect.signature(inspect.unwrap(forward)).parameters if name != "self"]


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() and not value.is_complex()


def extended(tensor: Tensor, bucket: int, value: int) -> Tensor:
    """Return a tensor [B, S] with further columns of this value: [B, bucket]."""
    return functional.pad(tensor, (0, bucket - tensor.shape[1]), value=value)
