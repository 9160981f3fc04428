"""The inputs for compiling one instruction: its operands, its modifiers and the architecture.

For every family of instructions, a function takes a `Compiling` and returns a step (a function of the state that
executes the instruction), or None if the mnemonic does not belong to the family. A modifier that the family does not
read is an error, so that no modifier is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import operands
from .errors import UnknownInstruction
from .operands import Operand
from .state import State
from .targets import Target
from .text import Instruction

Step = Callable[[State], Any]

_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")


@dataclass
class Compiling:
    """One instruction that is being compiled to a step."""

    instruction: Instruction
    target: Target
    # The `Environment` with memory, LDS and scratch; None for steps that programs share.
    machine: Any
    index: int
    taken: set[str] = field(default_factory=set)

    @property
    def mnemonic(self) -> str:
        return self.instruction.mnemonic

    @cached_property
    def base(self) -> str:
        """The mnemonic without its encoding."""
        return _ENCODING.sub("", self.instruction.mnemonic)

    @cached_property
    def sdwa(self) -> bool:
        return self.mnemonic.endswith("_sdwa")

    @cached_property
    def dpp(self) -> bool:
        return self.mnemonic.endswith("_dpp")

    @cached_property
    def operands(self) -> list[Operand]:
        """The parsed operands, without SDWA's sext(), which `Sources` handles."""
        return [operands.parse(text.removeprefix("sext(").rstrip(")")) for text in self.instruction.operands]

    def take(self, name: str, default: Any = None) -> Any:
        """Return a modifier's value and mark the modifier as implemented."""
        self.taken.add(name)
        return self.instruction.modifiers.get(name, default)

    def has(self, name: str) -> bool:
        return name in self.instruction.modifiers

    def refuse(self, reason: str) -> UnknownInstruction:
        return UnknownInstruction(f"{self.instruction.text!r} on {self.target.name}: {reason}")

    def finish(self) -> None:
        """Raise `UnknownInstruction` if a modifier was not read."""
        left = sorted(set(self.instruction.modifiers) - self.taken)
        if left:
            raise self.refuse(f"modifier {', '.join(left)} is not implemented")
