"""The roofline: the time that the necessary bytes and operations take at the rates measured on this machine.

A decode step reads the weights that it uses, and the keys and values that it attends to, once. A prefill multiplies
every token by the weights that the token uses. Embedding tables do not count, since only a few rows are read. With
several ranks, the bytes and operations are those of one rank, and the time to send its messages is added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.rates import Rates


class Floor(NamedTuple):
    """The lower bound of one timed unit: its time in milliseconds, bytes and FLOPs.

    by: what limits it, `memory` or `compute` (the GEMM rate). exchange: the time in milliseconds to send a rank's
    messages, computed from their size and the measured bandwidth.
    """

    milliseconds: float
    bytes: float
    flops: float
    by: str
    exchange: float = 0.0


def floor(model: Any, case: Case, rates: Rates, *, ranks: int = 1, exchange: float = 0.0) -> Floor:
    """Return the lower bound of one unit of a case: one token per row in decoding, else the whole forward pass.

    ranks: the number of ranks that share the weights and heads of the model. exchange: the time in seconds that a rank
    takes to send its messages.
    """
    read, flops = (decode_work if case.kind == "decode" else forward_work)(model, case, ranks)
    memory, compute = read / rates.copy, flops / rates.matmul
    by = "memory" if memory >= compute else "compute"
    return Floor(1000 * (max(memory, compute) + exchange), read, flops, by, 1000 * exchange)


def decode_work(model: Any, case: Case, ranks: int = 1) -> tuple[float, float]:
    """Return the bytes and FLOPs of one decode step on one rank, halfway through the new tokens."""
    context = case.prompt + case.new // 2
    cached = sum(_attended(context, window) for window in windows(model)) * _key_bytes(model) / ranks
    weights = Weights.of(model)
    read = weights.bytes(tokens=case.batch) + case.batch * cached
    attention = 4 * _query_width(model) * sum(_attended(context, window) for window in windows(model)) / ranks
    return read, case.batch * (weights.flops() + attention)


def forward_work(model: Any, case: Case, ranks: int = 1) -> tuple[float, float]:
    """Return the bytes and FLOPs of a forward pass over the prompt or image.

    In a prefill, the head runs only on the last position of each row.
    """
    length = case.prompt or _positions(model)
    causal = case.kind == "prefill"
    weights = Weights.of(model)
    pairs = sum(_pairs(length, window, causal=causal) for window in windows(model))
    gemms = weights.flops() * length - (2 * weights.head * (length - 1) if causal else 0)
    flops = case.batch * (gemms + 4 * _query_width(model) * pairs / ranks)
    return weights.bytes(tokens=case.batch * length), flops


class Weights(NamedTuple):
    """The number of elements in the matrices of a model, or in this rank's part of them if the model is sharded.

    dense: elements that every token uses, including the head. routed: elements of all experts together. share: the
    fraction of the experts that a token uses. head: elements of the output embeddings. item: bytes per element.
    """

    dense: int
    routed: int
    share: float
    head: int
    item: int

    @classmethod
    def of(cls, model: Any) -> Weights:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        counted: set[int] = set()
        dense = routed = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.ndim < 2 or id(parameter) in counted:
                    continue
                counted.add(id(parameter))
                if "experts" in name.split(".") and "shared_experts" not in name:
                    routed += local(parameter).numel()
                else:
                    dense += local(parameter).numel()
        item = next(model.parameters()).element_size()
        return cls(dense, routed, _expert_share(model), local(head.weight).numel() if head is not None else 0, item)

    def bytes(self, *, tokens: int) -> float:
        """Return the bytes read for this many tokens, with the expected number of experts under uniform routing."""
        chosen = 1 - (1 - self.share) ** tokens
        return self.item * (self.dense + self.routed * chosen)

    def flops(self) -> float:
        """Return the number of FLOPs per token."""
        return 2 * (self.dense + self.routed * self.share)


def local(parameter: Any) -> Any:
    """Return this rank's part of a parameter, without a copy; the whole parameter if it is not sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def windows(model: Any) -> list[int | None]:
    """Return every layer's sliding window in tokens; None for a layer without one, which counts as full attention."""
    config = _text(model)
    layers = getattr(config, "num_hidden_layers", 0)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def cache_bytes(model: Any, case: Case) -> int:
    """Return the bytes of a static cache for the keys and values of a whole decode case."""
    length = case.prompt + case.new
    return int(case.batch * sum(_attended(length, window) for window in windows(model)) * _key_bytes(model))


def _attended(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _pairs(length: int, window: int | None, *, causal: bool) -> float:
    """Return the number of pairs of a query and a key that it attends to. The window applies only if causal."""
    if not causal:
        return length * length
    width = _attended(length, window)
    return width * (width + 1) / 2 + (length - width) * width


def _key_bytes(model: Any) -> int:
    """Return the bytes of one position's keys and values in one layer."""
    config = _text(model)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * kv_heads * _head_dim(config) * next(model.parameters()).element_size()


def _query_width(model: Any) -> int:
    config = _text(model)
    return int(config.num_attention_heads * _head_dim(config))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _expert_share(model: Any) -> float:
    config = _text(model)
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)
    return getattr(config, "num_experts_per_tok", 0) / experts if experts else 0.0


def _positions(model: Any) -> int:
    """Return the number of patches in an image."""
    config = model.config
    return int((config.image_size // config.patch_size) ** 2)


def _text(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
