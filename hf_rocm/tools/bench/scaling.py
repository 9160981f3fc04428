"""Compute, without measuring, how much data tensor parallelism exchanges per token and how this affects the speed-up.

Every decoder layer sums its activations over the ranks twice: after the attention's output projection and after the
MLP's down projection. A message is [B, S, hidden]. In a decode step at batch 1, it takes tens of kilobytes at most, too
little to saturate a link, so the speed-up depends on the latency of an all-reduce and on the fraction of a step that
can be parallelised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """A dense decoder. matrices: the elements that every token uses (embeddings are looked up). keys: the elements of
    one token's keys and values in all layers. item: bytes per element."""

    hidden: int
    layers: int
    kv_heads: int
    vocabulary: int
    matrices: int
    keys: int
    item: int = 2

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, item: int = 2) -> Decoder:
        """Create a decoder from a config's settings (see `known_shapes`), with identical layers and gated MLPs."""
        hidden, layers = settings["hidden_size"], settings["num_hidden_layers"]
        heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
        head = settings.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
        layer = attention + 3 * hidden * settings["intermediate_size"]
        return cls(
            hidden,
            layers,
            kv_heads,
            settings["vocab_size"],
            layers * layer + settings["vocab_size"] * hidden,
            2 * layers * kv_heads * head,
            item,
        )

    @property
    def weights(self) -> int:
        """The bytes of all matrices, including an embedding table that is not tied to the head."""
        return self.item * (self.matrices + self.vocabulary * self.hidden)


@dataclass(frozen=True)
class Exchange:
    """The collectives of one step. sums: the number of all-reduces. message: bytes per all-reduce. gathered: bytes of
    the all-gathered logits, if the head is sharded too."""

    ranks: int
    sums: int
    message: int
    gathered: int = 0

    @property
    def sent(self) -> float:
        """The bytes that one rank sends in a step with the ring algorithm.

        These are 2 (N − 1) / N of an all-reduce's message and (N − 1) / N of an all-gather's. No algorithm without
        in-network reduction sends less; a tree sends as much in fewer and larger steps.
        """
        share = (self.ranks - 1) / self.ranks
        return share * (2 * self.sums * self.message + self.gathered)


def exchange(decoder: Decoder, ranks: int, *, tokens: int = 1, embedding: bool = False, head: bool = False) -> Exchange:
    """Return the collectives of a forward pass over this number of tokens (batch × length).

    embedding, head: whether the embedding table and the head are sharded too, which depends on the release of
    transformers. The logits of one position are gathered.
    """
    if ranks == 1:
        return Exchange(1, 0, 0)
    sums = 2 * decoder.layers + (1 if embedding else 0)
    return Exchange(
        ranks, sums, tokens * decoder.hidden * decoder.item, decoder.vocabulary * decoder.item if head else 0
    )


def step_seconds(decoder: Decoder, ranks: int, bandwidth: float, *, batch: int = 1, context: int = 0) -> float:
    """Return a lower bound on the time of a decode step on one rank, without the collectives, in seconds.

    bandwidth: the bandwidth of one GPU's memory, in bytes per second.
    """
    read = decoder.item * (decoder.matrices + batch * context * decoder.keys)
    return read / ranks / bandwidth


def wire_seconds(message: int, ranks: int, link: float) -> float:
    """Return a lower bound on the time of one ring all-reduce, in seconds, from its size alone.

    link: bytes per second of one link, in each direction.
    """
    return 2 * (ranks - 1) / ranks * message / link


def nodes_wire_seconds(message: int, *, nodes: int, per_node: int, link: float, nic: float) -> float:
    """Return a lower bound on the time of one all-reduce across several nodes, in seconds.

    It consists of a reduce-scatter within each node, an all-reduce across nodes and an all-gather within each node.
    nic: bytes per second of one GPU's share of the network, in each direction.
    """
    within = wire_seconds(message, per_node, link)
    across = wire_seconds(message, nodes, nic) / per_node
    return within + across


def allowed_seconds(decoder: Decoder, fewer: int, more: int, bandwidth: float) -> float:
    """Return the additional latency of an all-reduce above which `more` ranks decode more slowly than `fewer` ranks.

    The latency is relative to an all-reduce over `fewer` ranks, at batch 1.
    """
    saved = step_seconds(decoder, fewer, bandwidth) - step_seconds(decoder, more, bandwidth)
    return saved / (2 * decoder.layers)
