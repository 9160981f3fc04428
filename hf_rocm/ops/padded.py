"""Padded batches for kernels without masks: the written rows of a cache, or packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_rocm.ops.decode import decode_attention
from hf_rocm.ops.varlen import varlen_attention


@dataclass(frozen=True, eq=False)
class CacheRows:
    """The written keys of a cache, as device tensors: arguments of `decode_attention`.

    They describe causal attention of the last S_q queries of each row. key_lengths: [B], or [1] for all rows, int32 or
    int64: the number of keys of the row so far, including left padding and the keys of this call's queries. key_starts:
    [B], or None without padding: the number of padding keys at the front. Both count from the first token of the row,
    even if the cache has dropped keys since, so that one pair serves every layer: if key_lengths exceeds the number of
    keys passed to attention, these are the last keys of a rolling cache. window: the sliding window of the layers that
    use this object, or None. key_ends: [B + 1] int32, the cumulative lengths, starting at 0, or None.

    All tensors may be updated in place between calls: a recorded graph reads them at each replay, and the host never
    reads them.
    """

    key_lengths: Tensor
    key_starts: Tensor | None = None
    window: int | None = None
    key_ends: Tensor | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention that this object describes, with `decode_attention`. Returns [B, S_q, H, D_v]."""
        return decode_attention(
            query,
            key,
            value,
            self.key_lengths,
            scale=scale,
            starts=self.key_starts,
            window=self.window,
            softcap=softcap,
            sinks=sinks,
            ends=self.key_ends,
        )


@dataclass(frozen=True, eq=False)
class Packed:
    """A padded batch without its padding keys, as packed sequences: arguments of `varlen_attention`.

    queries, keys: the flat positions in [B · S_q] and [B · S_k] of the tokens that are packed. Padding queries are left
    out only if `causal`. query_ends, key_ends: [B + 1] int32, the cumulative numbers of packed tokens of the rows,
    starting at 0. longest_query, longest_key: the largest number of packed tokens in a row.
    """

    key_ends: Tensor
    query_ends: Tensor
    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Like `CacheRows.attend`, but with `varlen_attention`: sinks must be None; omitted queries get zeros."""
        b, h, s_q, _ = query.shape
        output = varlen_attention(
            query.transpose(1, 2).flatten(0, 1)[self.queries],
            key.transpose(1, 2).flatten(0, 1)[self.keys],
            value.transpose(1, 2).flatten(0, 1)[self.keys],
            self.query_ends,
            self.key_ends,
            longest_query=self.longest_query,
            longest_key=self.longest_key,
            scale=scale,
            causal=self.causal,
            window=self.window,
            softcap=softcap,
        )
        whole = output.new_zeros((b * s_q, h, value.shape[3])).index_copy(0, self.queries, output)
        return whole.view(b, s_q, h, value.shape[3])


Padded = CacheRows | Packed
