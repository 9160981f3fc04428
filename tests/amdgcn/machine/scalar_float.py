"""Scalar floating-point instructions and conversions of gfx11.5 and gfx12, and the mode of 8-bit conversions."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import floats
from .compiling import Compiling, Step
from .operands import scalar_reader
from .scalar import put
from .state import State

u32, f32 = np.uint32, np.float32

FLOAT: dict[str, Callable[..., np.ndarray]] = {
    "s_add_f32": lambda a, b: a + b,
    "s_sub_f32": lambda a, b: a - b,
    "s_mul_f32": lambda a, b: a * b,
    "s_max_num_f32": np.fmax,
    "s_min_num_f32": np.fmin,
    "s_trunc_f32": np.trunc,
    "s_floor_f32": np.floor,
    "s_ceil_f32": np.ceil,
    "s_rndne_f32": np.rint,
    "s_fmaak_f32": floats.fma32,
    "s_fmamk_f32": lambda a, k, b: floats.fma32(a, k, b),
}


def compile_scalar_float(c: Compiling) -> Step | None:
    return (_float(c) or _conversions(c) if c.target.scalar_float else None) or _mode(c)


def _float(c: Compiling) -> Step | None:
    if c.base == "s_fmac_f32":
        readers = [scalar_reader(operand, "f") for operand in (*c.operands[1:], c.operands[0])]
        function: Callable[..., np.ndarray] = floats.fma32
    elif c.base in FLOAT:
        readers = [scalar_reader(operand, "f") for operand in c.operands[1:]]
        function = FLOAT[c.base]
    else:
        return None
    write = put(c, c.operands[0])
    return lambda state: write(state, function(*(reader(state) for reader in readers)).view(u32))


def _conversions(c: Compiling) -> Step | None:
    match = re.fullmatch(r"s_cvt_(f32|u32|i32|f16)_(f32|u32|i32|f16)", c.base)
    if not match:
        return None
    target, source = match.groups()
    write = put(c, c.operands[0])
    if source in ("u32", "i32"):
        read = scalar_reader(c.operands[1], source[0])
        return lambda state: write(state, read(state).astype(f32).view(u32))
    if source == "f16":
        bits = scalar_reader(c.operands[1], "u")
        return lambda state: write(state, bits(state).astype(np.uint16).view(np.float16).astype(f32).view(u32))
    read = scalar_reader(c.operands[1], "f")
    if target == "f16":
        return lambda state: write(state, read(state).astype(np.float16).view(np.uint16).astype(u32))
    low, high = (0, 2**32 - 1) if target == "u32" else (-(2**31), 2**31 - 1)
    return lambda state: write(state, floats.to_integer(read(state), low, high).astype(u32))


def _mode(c: Compiling) -> Step | None:
    """s_setreg_imm32_b32 for MODE.FP16_OVFL, which selects how conversions to 8-bit floats treat overflow."""
    if c.base != "s_setreg_imm32_b32":
        return None
    register = "HW_REG_WAVE_MODE" if c.target.generation == 12 else "HW_REG_MODE"
    if re.sub(r"\s", "", c.instruction.operands[0]) != f"hwreg({register},23,1)":
        raise c.refuse("only MODE.FP16_OVFL can be set")
    value = bool(int(c.instruction.operands[1], 0) & 1)

    def step(state: State) -> None:
        state.overflow_clamps = value

    return step
