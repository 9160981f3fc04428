"""The tensors that recorded decode steps read in place: token ids, positions, lengths and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm import ops
from hf_rocm.generation.masks import Kind, StepMask
from hf_rocm.generation.static_buffers import settle, written
from hf_rocm.ops.specs.step import BeginStepCall

# The rows of the cache that a step writes to: a tensor, [P], that receives first, first + 1, …; and first
Places = tuple[Tensor, int]


class Source(NamedTuple):
    """Where the token ids of a step are on the device: see the fields of `BeginStepCall` with these names.

    header: the position of the step, and where the drafts are, if the host has neither yet.
    """

    ids: Tensor
    extra_ids: Tensor | None
    first: int
    drafts: int
    header: Tensor | None = None


class Form(NamedTuple):
    """The properties that determine the tensors of a step.

    rows: the number of rows of its position_ids, 0 without them. widths: the number of keys that attention receives,
    per kind of layer. rolling: whether sliding layers drop their first key for every new one once they are full.
    """

    batch: int
    tokens: int
    rows: int
    kinds: tuple[Kind, ...]
    widths: tuple[int, ...]
    # The dtype of the token ids, and of every kind's mask.
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    padded: bool
    rolling: bool


class Residents:
    """The tensors that the steps over one cache read, for one batch size and number of tokens, with or without padding.

    position: the position of the step's first token, counted from the first token of the rows. bases: per kind of
    layer, the position of the first row in the buffers. The owner calls `set` and `rebase` before the first step of a
    call, and then `write`.
    """

    def __init__(self, form: Form) -> None:
        b, n, kinds = form.batch, form.tokens, len(form.kinds)
        self.form = form
        # None if it is only on the device.
        self.position: int | None = 0
        self.bases: tuple[int, ...] = ()
        self.input_ids = settle(torch.empty((b, n), dtype=form.dtypes[0], device=form.device))
        # All tokens so far, to recompute earlier steps.
        self.tokens: Tensor | None = None  # [B, S]
        # The number of earlier steps since user code last changed tokens in place.
        self.unedited = 0
        # One tensor, so that one operation writes everything. For every token of the step, it contains the position,
        # the length per kind and the position per row; `_relative` contains the same minus `position`.
        self._clock = torch.zeros((1 + kinds + form.rows, n), dtype=torch.int64, device=form.device)
        self._offsets = torch.arange(n, device=form.device)
        self._relative = self._clock + self._offsets
        self.clocks = {"cache_position": settle(self._clock[0])}
        if form.rows:
            self.clocks["position_ids"] = settle(self._clock[1 + kinds :])
        self._padding = torch.zeros(b, dtype=torch.int64, device=form.device) if form.padded else None
        self._starts = [None if self._padding is None else self._padding.clone() for _ in form.kinds]
        self.masks = [
            StepMask((b, 1, n, width), dtype, kind.window, self._clock[1 + index], start)
            for index, (kind, width, dtype, start) in enumerate(
                zip(form.kinds, form.widths, form.dtypes[1:], self._starts, strict=True)
            )
        ]

    def set(self, position: int, origin: Tensor | None, padding: Tensor | None) -> None:
        """Set the position of the first token.

        origin: the position_ids of position 0, [rows, 1]. padding: the number of padding tokens per row, [B].
        """
        self.position, self.bases = position, ()
        if origin is not None:
            torch.add(self._offsets, origin, out=self._relative[1 + len(self.masks) :])
        if self._padding is not None and padding is not None:
            self._padding.copy_(padding)

    def follow(self, tokens: Tensor | None) -> None:
        """Keep all tokens so far, [B, S]; None: keep none, because the steps verify drafts.

        User code may have changed them, or those of the previous step, in place.
        """
        self.unedited = 0 if written(self.tokens) or written(tokens) else self.unedited + 1
        self.tokens = tokens

    def rebase(self, bases: tuple[int, ...]) -> None:
        """Set the position of the first row in the buffers of every kind of layer."""
        for index, base in enumerate(bases):
            torch.add(self._offsets, 1 - base, out=self._relative[1 + index])
            start = self._starts[index]
            if start is not None:
                assert self._padding is not None
                start.copy_((self._padding - base).clamp(min=0))
        self.bases = bases

    def write(self, position: int | None, places: Sequence[Places] = (), source: Source | None = None) -> None:
        """Write all tensors of a step at this position, in one operation.

        places: for up to two windows. source: the token ids; None leaves `input_ids` unchanged. If the position is only
        on the device, position is None, source has a header, and rows in places are relative to the position.
        """
        self.position = position
        (mask, starts, window), (mask_2, starts_2, window_2) = [*map(_terms, self.masks), _NO_MASK, _NO_MASK][:2]
        (rows, row), (rows_2, row_2) = [*places, _NO_PLACES, _NO_PLACES][:2]
        input_ids = None if source is None else self.input_ids
        ids, extra_ids, first, drafts, header = _NO_IDS if source is None else source
        call = BeginStepCall(
            self._clock,
            self._relative,
            mask,
            mask_2,
            starts,
            starts_2,
            rows,
            rows_2,
            input_ids,
            ids,
            extra_ids,
            header,
            position or 0,
            window,
            window_2,
            self.masks[0].hidden if self.masks else None,
            self.form.rolling,
            row,
            row_2,
            first,
            drafts,
        )
        ops.begin_step(call)


def _terms(mask: StepMask) -> tuple[Tensor, Tensor | None, int | None]:
    return mask.written, mask.rows.key_starts, mask.rows.window


_NO_MASK: tuple[Tensor | None, Tensor | None, int | None] = None, None, None
_NO_PLACES: tuple[Tensor | None, int] = None, 0
_NO_IDS: tuple[Tensor | None, Tensor | None, int, int, Tensor | None] = None, None, 0, 0, None
