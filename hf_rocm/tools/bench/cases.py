"""The timed cases: decoding, prefill or an encoder's forward pass, at one batch size and length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

KINDS = ("decode", "prefill", "encode")


class Case(NamedTuple):
    """One case to time. prompt: tokens per row (0 for an image encoder). new: generated tokens per row."""

    kind: str
    batch: int
    prompt: int
    new: int = 0

    @property
    def title(self) -> str:
        if self.kind == "decode":
            return f"decode, batch {self.batch}, prompt {self.prompt}, {self.new} new tokens"
        if self.kind == "prefill":
            return f"prefill, {self.batch} × {self.prompt} tokens"
        return f"encoder, batch {self.batch}" + (f", {self.prompt} tokens" if self.prompt else "")

    @property
    def unit(self) -> str:
        """The unit in which the tables give times."""
        return {"decode": "ms per token", "prefill": "ms", "encode": "ms"}[self.kind]

    def rate(self, milliseconds: float) -> float:
        """Return tokens per second over the whole batch (samples per second for an encoder)."""
        per_unit = self.batch * self.prompt if self.kind == "prefill" else self.batch
        return per_unit * 1000 / milliseconds


def grid(kinds: Iterable[str], batches: Iterable[int], prompts: Iterable[int], *, new: int) -> list[Case]:
    """Return all combinations, in the order of the kinds, then of the prompts, then of the batches."""
    lengths = list(prompts)
    return [
        Case(kind, batch, prompt, new if kind == "decode" else 0)
        for kind in kinds
        for prompt in lengths
        for batch in batches
    ]
