"""Conversions between float32 and 8-bit floats in the architecture's format: fnuz on gfx942, OCP elsewhere."""

from __future__ import annotations

import re

import numpy as np

from . import floats
from .compiling import Compiling, Step
from .operands import vector_reader
from .sources import Sources
from .state import State
from .targets import Target

u32, u64, f32, f64 = np.uint32, np.uint64, np.float32, np.float64


def small(target: Target, kind: str) -> floats.Small:
    """The architecture's format for "fp8" or "bf8"."""
    return floats.small(f"{kind}_fnuz" if target.fnuz else kind)


def compile_eight_bit(c: Compiling) -> Step | None:
    if not c.target.eight_bit:
        return None
    if match := re.fullmatch(r"v_cvt_pk_(fp8|bf8)_f32", c.base):
        return _pack(c, match[1])
    if match := re.fullmatch(r"v_cvt_sr_(fp8|bf8)_f32", c.base):
        return _stochastic(c, match[1])
    if (match := re.fullmatch(r"v_cvt_scalef32_pk_(fp8|bf8)_f32", c.base)) and c.target.name == "gfx950":
        return _pack(c, match[1], scaled=True)
    if (match := re.fullmatch(r"v_cvt_scalef32_pk_f32_(fp8|bf8)", c.base)) and c.target.name == "gfx950":
        return _scaled(c, match[1])
    if match := re.fullmatch(r"v_cvt_(pk_)?f32_(fp8|bf8)", c.base):
        return _unpack(c, match[2], packed=bool(match[1]))
    return None


def _pack(c: Compiling, kind: str, *, scaled: bool = False) -> Step:
    """Convert two float32 values to two codes in one half of a register. The last bit of op_sel selects the half; the
    other half is unchanged. scaled: the values are divided by the power of two that is the last operand; only 1.0 is
    supported."""
    half = c.take("op_sel", (0, 0, 0))[-1]
    if scaled and c.instruction.operands[3].strip() != "1.0":
        raise c.refuse("only a scale of 1.0 is supported")
    first, second = (vector_reader(operand, "f") for operand in c.operands[1:3])
    register, format = c.operands[0].register, small(c.target, kind)

    def step(state: State) -> None:
        low = format.encode(first(state), clamp=state.overflow_clamps)
        high = format.encode(second(state), clamp=state.overflow_clamps)
        state.put_half(register, half, (low | high << u32(8)).astype(np.uint16))

    return step


def _stochastic(c: Compiling, kind: str) -> Step:
    """Convert one float32 value to a code in the byte that op_sel or byte_sel selects. Random bits are added below the
    last bit of the mantissa, and then the value is truncated."""
    select = c.take("op_sel", (0, 0, 0, 0))
    byte = select[2] + 2 * select[3] if len(select) > 3 else c.take("byte_sel", 0)
    value, random = vector_reader(c.operands[1], "f"), vector_reader(c.operands[2], "u")
    register, format = c.operands[0].register, small(c.target, kind)
    dropped = 23 - format.mantissa

    def step(state: State) -> None:
        number = value(state)
        bits = np.ascontiguousarray(number).view(u32)
        exponent = (bits >> u32(23) & u32(255)).astype(np.int32) - 127
        # Subnormal codes have fewer significant bits.
        extra = np.clip(1 - format.bias - exponent, 0, 31 - dropped)
        shift = (dropped + extra).astype(u32)
        noise = random(state) >> (u32(32) - shift)
        noisy = bits + np.where(np.isfinite(number), noise, u32(0))
        truncated = np.where(np.isfinite(number), noisy >> shift << shift, bits)
        code = format.encode(truncated.view(f32), clamp=state.overflow_clamps)
        mask = u32(255 << 8 * byte)
        state.put(register, state.v[register] & ~mask | code << u32(8 * byte))

    return step


def _unpack(c: Compiling, kind: str, *, packed: bool) -> Step:
    """Convert one code, or the two codes of a half, to float32. They are selected by SDWA's source selection, by
    op_sel or by byte_sel."""
    format, register = small(c.target, kind), c.operands[0].register
    if packed:
        half = c.take("op_sel", (0, 0))[0]
        if c.sdwa:
            half = {"WORD_0": 0, "WORD_1": 1}[c.take("src0_sel", "WORD_0")]
            whole_register(c)
        read = vector_reader(c.operands[1], "w", half=half)

        def both(state: State) -> None:
            codes = read(state)
            low, high = format.decode(codes & np.uint16(255)), format.decode(codes >> np.uint16(8))
            state.put(register, low)
            state.put(register + 1, high)

        return both
    if c.sdwa:
        sources = Sources(c, [c.instruction.operands[1]], "u")
        whole_register(c)
        return lambda state: state.put(register, format.decode(sources(state)[0] & u32(255)))
    select = c.take("op_sel", (0, 0))
    byte = c.take("byte_sel", select[0] * 2 + select[1] if c.target.generation == 12 else select[0] + 2 * select[1])
    source = vector_reader(c.operands[1], "u")
    return lambda state: state.put(register, format.decode(source(state) >> u32(8 * byte) & u32(255)))


def _scaled(c: Compiling, kind: str) -> Step:
    """Convert the two codes of a half and multiply them by a power of two. The exponent of the last operand is
    the exponent of this power; its mantissa and sign are ignored."""
    format, register = small(c.target, kind), c.operands[0].register
    read = vector_reader(c.operands[1], "w", half=c.take("op_sel", (0, 0, 0))[0])
    scale = vector_reader(c.operands[2], "f")

    def step(state: State) -> None:
        codes, factor = read(state), scale(state)
        exponent = (np.ascontiguousarray(factor).view(u32) >> u32(23) & u32(255)).astype(np.int32) - 127
        for place, code in enumerate((codes & np.uint16(255), codes >> np.uint16(8))):
            state.put(register + place, np.ldexp(format.decode(code), exponent).astype(f32))

    return step


def whole_register(c: Compiling) -> None:
    """Read the modifiers of the destination. Raises `UnknownInstruction` if it is not a whole register."""
    if c.take("dst_sel", "DWORD") != "DWORD":
        raise c.refuse("SDWA must write the whole register")
    c.take("dst_unused")
