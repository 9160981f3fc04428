"""Check that two servers return the same answers to the same greedy requests.

In fp32, all answers must be equal. In bf16 and fp16, the two largest logits are often equal up to rounding. Then the
order of a summation decides which token is chosen, and the answers differ from that token on. So the number of first
differences per compared token is limited. This number does not depend on the length of the answers, since nothing is
compared after a difference.

With random weights, the logits are close together, and rounding changes about one token in fifteen; wrong attention or
wrong weights change almost every token. `hf-rocm verify` compares logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

EXACT = "float32"
# First differences per compared token that are always allowed in 16-bit dtypes.
_LEAST = 0.2


class Agreement(NamedTuple):
    """A comparison of two sides on the same requests.

    equal: the number of equal answers. total: the number of all answers. rate: first differences per compared token.
    stock: the same rate between stock's answers to single and to batched requests.
    """

    equal: int
    total: int
    rate: float
    stock: float
    dtype: str

    @property
    def allowed(self) -> float:
        return 0.0 if self.dtype == EXACT else max(2 * self.stock, _LEAST)

    @property
    def wrong(self) -> bool:
        return self.rate > self.allowed or (self.dtype == EXACT and self.equal < self.total)

    @property
    def sentence(self) -> str:
        """The result, with the tolerance if an answer differs."""
        if self.equal == self.total:
            return f"parity: hf_rocm returned stock's text for all {self.total} greedy requests"
        return (
            f"parity: hf_rocm returned stock's text for {self.equal} of {self.total} greedy requests; "
            f"{_percent(self.rate)} of the compared tokens differ. {self.tolerance}"
        )

    @property
    def tolerance(self) -> str:
        if self.dtype == EXACT:
            return f"{EXACT} allows no difference: every answer must be equal"
        return (
            f"Allowed in {self.dtype}: {_percent(self.allowed)} (stock itself: "
            f"{_percent(self.stock)} between single and batched requests); `hf-rocm verify` compares logits"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "allowed": self.allowed}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Agreement:
        return cls(*(data[name] for name in cls._fields))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def agreement(
    stock: Sequence[str], answers: Sequence[str], *, batched: Sequence[str], tokens: int, dtype: str
) -> Agreement:
    """Compare the answers of both sides.

    batched: stock's answers to the same requests, sent at the same time. tokens: the number of tokens of every answer.
    """
    equal = sum(one == other for one, other in zip(stock, answers, strict=True))
    return Agreement(equal, len(stock), differences(stock, answers, tokens), differences(stock, batched, tokens), dtype)


def differences(expected: Sequence[str], actual: Sequence[str], tokens: int) -> float:
    """Return the number of first differences per compared token. Tokens of an answer are assumed to be equally long."""
    different = compared = 0.0
    for one, other in zip(expected, actual, strict=True):
        if one == other:
            compared += tokens
        else:
            different += 1
            compared += min(tokens, 1 + tokens * _common(one, other) / max(1, len(one)))
    return different / compared if compared else 0.0


def _common(one: str, other: str) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)
