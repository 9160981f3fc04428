"""An interpreter of AMD's instruction sets for the assembly that Triton emits. It uses numpy arrays over waves and
lanes and needs no GPU."""

from .errors import (
    Descriptor,
    EarlyAccess,
    Garbage,
    Hazard,
    MachineError,
    OutOfBounds,
    Race,
    Rounding,
    Runaway,
    UnknownInstruction,
)
from .memory import Memory
from .program import Program
from .run import Report, launch

__all__ = [
    "Descriptor",
    "EarlyAccess",
    "Garbage",
    "Hazard",
    "MachineError",
    "Memory",
    "OutOfBounds",
    "Program",
    "Race",
    "Report",
    "Rounding",
    "Runaway",
    "UnknownInstruction",
    "launch",
]
