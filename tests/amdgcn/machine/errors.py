"""What the machine raises: every error names the instruction, and where one is known, the lane and the address."""

from __future__ import annotations


class MachineError(Exception):
    """Base of everything that a program under execution does wrong."""


class UnknownInstruction(MachineError):
    """A mnemonic, an operand or a modifier that the machine does not implement."""


class EarlyAccess(MachineError):
    """A register was read or overwritten while a load into it was in flight."""


class OutOfBounds(MachineError):
    """An address outside every buffer, outside LDS, or a write to a buffer that is read-only."""


class Descriptor(MachineError):
    """A buffer's descriptor is not the compiler's, or a lane beyond its end was not sent there on purpose."""


class Garbage(MachineError):
    """A NaN was stored whose bits no operation produces: of a register that nothing wrote, or of a wrong constant."""


class Race(MachineError):
    """Two waves touched one byte in one interval between barriers, and one of them wrote it."""


class Hazard(MachineError):
    """Two instructions are closer to one another than the hardware's wait states allow."""


class Rounding(MachineError):
    """A division or a conversion is not the sequence of instructions that rounds every number correctly."""


class Runaway(MachineError):
    """More instructions than the limit: a loop that does not end, or waves that wait for one another for ever."""
