"""The errors that the machine raises. Messages name the instruction, the lane and the address where they are known."""

from __future__ import annotations


class MachineError(Exception):
    """Base class of all errors that a program can cause."""


class UnknownInstruction(MachineError):
    """A mnemonic, an operand or a modifier that the machine does not implement."""


class EarlyAccess(MachineError):
    """A register was read or overwritten while a load into it was in flight."""


class OutOfBounds(MachineError):
    """An address outside every buffer, LDS or scratch memory, or in bytes that belong to no tensor; a scalar load that
    is not aligned; or a write to a read-only buffer."""


class Descriptor(MachineError):
    """A buffer descriptor that differs from the compiler's, or an unmasked lane beyond the end of the buffer."""


class Garbage(MachineError):
    """A NaN with bits that no operation produces was stored. It comes from uninitialised registers or memory, or from a
    wrong constant."""


class Race(MachineError):
    """Two waves accessed the same byte between two barriers, and one of them wrote it; two lanes of one instruction
    stored different values to the same address; or a barrier has no wait for stores to LDS before it."""


class Hazard(MachineError):
    """Fewer wait states between two instructions than the hardware requires."""


class Rounding(MachineError):
    """A division or conversion whose instruction sequence does not round every number correctly."""


class Runaway(MachineError):
    """More instructions than the limit: an endless loop or a deadlock between waves."""
