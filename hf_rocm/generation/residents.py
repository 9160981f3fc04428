"""The tensors that recorded decode steps read in place: token ids, positions, lengths and masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm.generation.masks import Kind, StepMask
from hf_rocm.generation.static_buffers import settle, written


class Form(NamedTuple):
    """The properties that determine the tensors of a step.

    rows: the number of rows of its position_ids, 0 without them. widths: the number of keys that attention gets, per
    kind of layer. rolling: whether full sliding layers drop their first key for every new one.
    """

    batch: int
    tokens: int
    rows: int
    kinds: tuple[Kind, ...]
    widths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # the dtype of the token ids, and of every kind's mask
    device: torch.device
    padded: bool
    rolling: bool


class Residents:
    """The tensors that the steps over one cache read, for one batch size and number of tokens, with or without padding.

    position: the position of the step's first token, counted from the first token of the rows. bases: per kind of
    layer, the position of the first row in the buffers. The owner calls `set` and `rebase` before the first step of a
    call.
    """

    def __init__(self, form: Form) -> None:
        b, n, kinds = form.batch, form.tokens, len(form.kinds)
        self.form = form
        self.position = 0
        self.bases: tuple[int, ...] = ()
        self.input_ids = settle(torch.empty((b, n), dtype=form.dtypes[0], device=form.device))
        self.tokens: Tensor | None = None  # [B, S], all tokens so far, to recompute earlier steps
        self.unedited = 0  # the number of earlier steps since user code last changed tokens in place
        # One tensor, so that one addition advances everything. For every token of the step, it contains the position,
        # the length per kind and the position per row.
        self._clock = torch.zeros((1 + kinds + form.rows, n), dtype=torch.int64, device=form.device)
        self._offsets = torch.arange(n, device=form.device)
        self.clocks = {"cache_position": settle(self._clock[0])}
        if form.rows:
            self.clocks["position_ids"] = settle(self._clock[1 + kinds :])
        self._padding = torch.zeros(b, dtype=torch.int64, device=form.device) if form.padded else None
        self._starts = [None if self._padding is None else self._padding.clone() for _ in form.kinds]
        self._lengths = [self._clock[1 + index] for index in range(kinds)]
        self.masks = [
            StepMask(
                torch.empty((b, 1, n, width), dtype=dtype, device=form.device),
                kind.window,
                lengths,
                start,
                rolls=form.rolling and kind.window is not None,
            )
            for kind, width, dtype, lengths, start in zip(
                form.kinds, form.widths, form.dtypes[1:], self._lengths, self._starts, strict=True
            )
        ]

    def set(self, position: int, origin: Tensor | None, padding: Tensor | None) -> None:
        """Set the position of the first token.

        origin: the position_ids of position 0, [B, 1]. padding: the number of padding tokens per row, [B].
        """
        self.position, self.bases = position, ()
        torch.add(self._offsets, position, out=self._clock[0])
        if origin is not None:
            self.clocks["position_ids"].copy_(self._clock[0] + origin)
        if self._padding is not None and padding is not None:
            self._padding.copy_(padding)

    def follow(self, tokens: Tensor | None) -> None:
        """Keep all tokens so far, [B, S]. User code may have changed them, or those of the previous step, in place."""
        self.unedited = 0 if written(self.tokens) or written(tokens) else self.unedited + 1
        self.tokens = tokens

    def rebase(self, bases: tuple[int, ...]) -> None:
        """Set the position of the first row in the buffers of every kind of layer."""
        for index, base in enumerate(bases):
            torch.add(self._offsets, self.position + 1 - base, out=self._lengths[index])
            start = self._starts[index]
            if start is not None:
                assert self._padding is not None
                start.copy_((self._padding - base).clamp(min=0))
            self.masks[index].rebase()
        self.bases = bases

    def advance(self, steps: int = 1) -> None:
        """Advance by `steps` tokens, or go back if the number is negative."""
        self.position += steps
        self._clock.add_(steps)
        for mask in self.masks:
            mask.refresh()
