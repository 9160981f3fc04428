"""Pack a kernel's arguments into bytes as HIP does for a launch, with the layout from the assembly's metadata."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

from tests.amdgcn.machine import Program

_INTEGER = re.compile(r"[iu](\d+)")
_FLOAT = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}


def pack(program: Program, values: Sequence[bytes], grid: tuple[int, int, int], threads: int) -> bytes:
    """The argument block of a launch. Arguments that Triton appends (its scratch buffers) are null."""
    out = bytearray(program.kernarg_size)
    given = iter(values)
    hidden = {f"hidden_block_count_{axis}": size for axis, size in zip("xyz", grid, strict=True)}
    hidden |= {"hidden_group_size_x": threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
    hidden |= {"hidden_grid_dims": 3}
    for argument in program.arguments:
        if argument.kind.startswith("hidden_"):
            value = hidden.get(argument.kind, 0).to_bytes(argument.size, "little")
        else:
            value = next(given, bytes(argument.size))
        if len(value) != argument.size:
            raise ValueError(f"expected an argument of {argument.size} bytes, got {len(value)}: {argument}")
        out[argument.offset : argument.offset + argument.size] = value
    left = len(list(given))
    if left:
        raise ValueError(f"got {left} more arguments than the kernel has")
    return bytes(out)


def scalar(value: Any, kind: str) -> bytes:
    """Convert a number to one of Triton's types as its launcher does."""
    integer = _INTEGER.fullmatch(kind)
    if integer is not None:
        width = max(1, int(integer[1]) // 8)
        return (int(value) & (1 << 8 * width) - 1).to_bytes(width, "little")
    if kind == "bf16":
        return struct.pack("<f", value)[2:]
    return struct.pack(_FLOAT[kind], value)
