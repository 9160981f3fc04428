"""The specifications of the operations that begin and end a decode step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BeginStepCall(NamedTuple):
    """The arguments of `begin_step`, for a step of N tokens with a cache that has up to two kinds of layers.

    clock: [C, N] int64, which receives relative + position. Its second and third rows are the lengths of the tokens in
    the two kinds of layers: the number of keys up to and including a token that were written to the buffer. mask:
    [B, 1, N, L], the bytes of a bool mask (uint8) or an additive one, which receives the mask of the first kind: of the
    keys up to its length, a query attends to the last `window` (None: all), but to none before `starts`, [B]. If
    rolling, a length may exceed L, and the buffer contains the last L keys. hidden: the value of hidden keys in an
    additive mask; None: the masks are bool. places: [P] int64, which receives the rows `row`, `row + 1`, and so on.
    input_ids: [B, N] int64, which receives token `first` and the N - 1 tokens from index `drafts` on. Both are indices
    into `ids`, [B, S], concatenated with `extra_ids`, [B, M]; missing drafts are zero. header: [2] int64, see
    `look_up_drafts`: its first number is added to position, row, row_2 and first, and its second one to drafts. Tensors
    except clock and relative may be None. The fields that end in _2 belong to the second kind.
    """

    clock: Tensor
    relative: Tensor
    mask: Tensor | None
    mask_2: Tensor | None
    starts: Tensor | None
    starts_2: Tensor | None
    places: Tensor | None
    places_2: Tensor | None
    input_ids: Tensor | None
    ids: Tensor | None
    extra_ids: Tensor | None
    header: Tensor | None
    position: int
    window: int | None
    window_2: int | None
    hidden: float | None
    rolling: bool
    row: int
    row_2: int
    first: int
    drafts: int


class BeginStepSpec(NamedTuple):
    """The specification of `begin_step`.

    dtype: that of the masks; uint8 without masks. masks, places, sources: the number of masks, of tensors with rows,
    and of tensors with tokens. batch: B of the masks; 1 without masks. tokens: N. starts, header: whether they are
    given. clocks: C · N. masks_match: whether the masks agree in dtype and batch size. contiguous: whether all tensors
    are.
    """

    dtype: torch.dtype
    device: torch.device
    masks: int
    batch: int
    tokens: int
    window: int | None
    window_2: int | None
    starts: bool
    clocks: int
    places: int
    sources: int
    header: bool
    masks_match: bool
    contiguous: bool
    grad: bool = False


class LookUpDraftsSpec(NamedTuple):
    """The specification of `look_up_drafts`.

    dtype: that of the ids. tokens: N. contiguous, all_int64, same_device: whether all tensors are contiguous,
    have dtype int64, and are on the device of the ids.
    """

    dtype: torch.dtype
    device: torch.device
    tokens: int
    ngram: int
    contiguous: bool
    all_int64: bool
    same_device: bool
    grad: bool = False


class FinishStepCall(NamedTuple):
    """The arguments of `finish_step`. words: the bits of the logits as integers, see `ops.bits.words`."""

    logits: Tensor
    words: Tensor
    out: Tensor
    tokens: Tensor
    digests: Tensor
    doubt: Tensor
    further: Tensor | None
    probability: Tensor | None


class FinishStepSpec(NamedTuple):
    """The specification of `finish_step`.

    words_dtype: the dtype of the integers with the bits of the logits. rows: B · N. dim: V. kept: the number of
    digests. further: whether there is a digest of further tensors. probable: whether the probability of the last token
    is computed. contiguous: whether the logits, their words, out, tokens and digests are.
    """

    dtype: torch.dtype
    words_dtype: torch.dtype
    device: torch.device
    rows: int
    dim: int
    kept: int
    further: bool
    probable: bool
    contiguous: bool
    grad: bool


class AppendTokensCall(NamedTuple):
    """The arguments of `hf_rocm.ops.append_tokens`, as its implementations take them."""

    ids: Tensor
    tokens: Tensor
    unfinished: Tensor
    ends: Tensor | None = None
    pad: Tensor | None = None
    step_ids: Tensor | None = None


class AppendTokensSpec(NamedTuple):
    """The specification of `append_tokens`.

    dtype: that of the ids. rows: B. ends: the number of EOS tokens. padded: whether there is a padding token. copied:
    whether the tokens are also written to the input of a step. contiguous, all_int64, same_device: whether all tensors
    are contiguous, have dtype int64, and are on the device of the ids.
    """

    dtype: torch.dtype
    device: torch.device
    rows: int
    ends: int
    padded: bool
    copied: bool
    contiguous: bool
    all_int64: bool
    same_device: bool
    grad: bool = False
