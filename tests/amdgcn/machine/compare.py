"""Comparison instructions, which write lane masks, and v_cndmask, which reads one."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .compiling import Compiling, Step
from .operands import EXEC, VCC, Operand
from .scalar import COMPARE
from .sources import Destination, Sources
from .state import State

_COMPARE = re.compile(r"v_cmp(x?)_(\w+)_([fiu])(16|32|64)")
_FUNCTIONS = {**COMPARE, "ne": lambda a, b: a != b}
_LETTERS = {"f16": "h", "f32": "f", "f64": "D", "i16": "s", "i32": "i", "i64": "I", "u16": "w", "u32": "u", "u64": "U"}


def mask_reader(c: Compiling, operand: Operand) -> Callable[[State], np.ndarray]:
    """Return a function that reads a scalar operand as a lane mask."""
    if operand.kind == "s":
        return lambda state: state.mask(operand.register)
    # A constant mask, such as 0 (no lanes) or -1 (all lanes).
    if operand.kind == "constant":
        bits = operand.value & (1 << c.target.lanes) - 1
        fixed = np.array([[bits >> lane & 1 for lane in range(c.target.lanes)]], bool)
        return lambda state: fixed
    if operand.kind == "none":
        nothing = np.zeros((1, c.target.lanes), bool)
        return lambda state: nothing
    raise c.refuse(f"{operand.text!r} is not a mask")


def mask_writer(c: Compiling, operand: Operand) -> Callable[[State, np.ndarray], None]:
    """Return a function that writes a lane mask; the bits of inactive lanes become zero."""
    if operand.kind == "none":
        return lambda state, lanes: None
    if operand.kind != "s":
        raise c.refuse(f"{operand.text!r} cannot be written as a mask")
    register = operand.register
    return lambda state, lanes: state.put_mask(register, lanes & state.x)


def compile_compare(c: Compiling) -> Step | None:
    if c.base == "v_cndmask_b32":
        return _choose(c)
    if match := re.fullmatch(r"v_cmp(x?)_class_f(32|16)", c.base):
        return _class(c, bool(match[1]), match[2])
    match = _COMPARE.fullmatch(c.base)
    if not match:
        return None
    function, letter = _FUNCTIONS.get(match[2]), _LETTERS[match[3] + match[4]]
    if function is None:
        return None
    write, texts = _target(c, bool(match[1]))
    sources = Sources(c, texts, letter * 2)

    def step(state: State) -> None:
        lanes = function(*sources(state))
        if lanes.shape != state.x.shape:
            lanes = np.broadcast_to(lanes, state.x.shape)
        write(state, lanes if sources.dpp is None else lanes & sources.written(state))

    return step


def _target(c: Compiling, executes: bool) -> tuple[Callable[[State, np.ndarray], None], list[str]]:
    """Return a function that writes the mask, and the texts of the sources. v_cmpx writes EXEC and, on CDNA, also a
    register."""
    texts = list(c.instruction.operands)
    if not executes:
        return mask_writer(c, c.operands[0]), texts[1:]
    if not c.target.cdna:
        return (lambda state, lanes: state.put_mask(EXEC, lanes & state.x)), texts
    write = mask_writer(c, c.operands[0])

    def both(state: State, lanes: np.ndarray) -> None:
        write(state, lanes)
        state.put_mask(EXEC, lanes & state.x)

    return both, texts[1:]


def _choose(c: Compiling) -> Step:
    texts = list(c.instruction.operands)
    select = mask_reader(c, c.operands[3] if len(texts) > 3 else Operand("vcc", "s", VCC, 2))
    sources = Sources(c, texts[1:3], "uu")
    destination = Destination(c, c.operands[0], "u", sources, preserves=False)

    def step(state: State) -> None:
        no, yes = sources(state)
        destination.put(state, np.where(select(state), yes, no))

    return step


def _class(c: Compiling, executes: bool, bits: str) -> Step:
    """v_cmp_class tests whether a float is in one of a mask's classes (NaN, infinity, normal, subnormal, zero)."""
    write, texts = _target(c, executes)
    sources = Sources(c, texts, ("f" if bits == "32" else "h") + "u")

    def step(state: State) -> None:
        value, kinds = sources(state)
        negative = np.signbit(value)
        tiny = np.finfo(value.dtype).tiny
        quiet_bit = 1 << (22 if bits == "32" else 9)
        raw = np.ascontiguousarray(value).view(np.uint32 if bits == "32" else np.uint16).astype(np.uint32)
        quiet = (raw & np.uint32(quiet_bit)) != 0
        # The class of zeros, which the next lines replace for all other values.
        bit = np.where(negative, 5, 6)
        bit = np.where((value != 0) & (np.abs(value) < tiny), np.where(negative, 4, 7), bit)
        bit = np.where(np.abs(value) >= tiny, np.where(negative, 3, 8), bit)
        bit = np.where(np.isinf(value), np.where(negative, 2, 9), bit)
        bit = np.where(np.isnan(value), np.where(quiet, 1, 0), bit)
        lanes = (kinds >> bit.astype(np.uint32) & np.uint32(1)).astype(bool)
        write(state, np.broadcast_to(lanes, state.x.shape))

    return step
