"""Instructions and modifiers that move data between the lanes of a wave."""

from __future__ import annotations

import numpy as np

from .compiling import Compiling, Step
from .operands import scalar_reader
from .scalar import put
from .state import State

u32, u64, i64 = np.uint32, np.uint64, np.int64


def dpp_source(c: Compiling) -> tuple[np.ndarray, np.ndarray]:
    """For a DPP control, return the source lane of every lane, and whether this source lane exists."""
    count = c.target.lanes
    lanes = np.arange(count)
    row, place = lanes & ~15, lanes & 15
    always = np.ones(count, bool)
    if (pattern := c.take("quad_perm")) is not None:
        return (lanes & ~3) + np.array(pattern)[lanes & 3], always
    if (pattern := c.take("dpp8")) is not None:
        return (lanes & ~7) + np.array(pattern)[lanes & 7], always
    if c.take("row_mirror"):
        return row + 15 - place, always
    if c.take("row_half_mirror"):
        return (lanes & ~7) + 7 - (lanes & 7), always
    if (n := c.take("row_shl")) is not None:
        return np.minimum(lanes + n, count - 1), place + n < 16
    if (n := c.take("row_shr")) is not None:
        return np.maximum(lanes - n, 0), place >= n
    if (n := c.take("row_ror")) is not None:
        return row + (place - n & 15), always
    if c.target.cdna:
        if (n := c.take("row_bcast")) is not None:
            # Broadcast the last lane of a row to the next row.
            if n == 15:
                return np.maximum(row - 1, 0), row >= 16
            # Broadcast the last lane of the first half to the second half.
            if n == 31:
                return np.full(count, 31), lanes >= 32
        if (n := c.take("row_newbcast")) is not None:
            return row + n, always
        if c.take("wave_shl") is not None:
            return np.minimum(lanes + 1, count - 1), lanes + 1 < count
        if c.take("wave_shr") is not None:
            return np.maximum(lanes - 1, 0), lanes >= 1
        if c.take("wave_rol") is not None:
            return (lanes + 1) % count, always
        if c.take("wave_ror") is not None:
            return (lanes - 1) % count, always
    else:
        if (n := c.take("row_share")) is not None:
            return row + n, always
        if (n := c.take("row_xmask")) is not None:
            return row + (place ^ n), always
    raise c.refuse("its DPP control is not implemented")


def dpp_enabled(c: Compiling) -> np.ndarray:
    """The lanes that row_mask and bank_mask enable."""
    lanes = np.arange(c.target.lanes)
    rows, banks = c.take("row_mask", 15), c.take("bank_mask", 15)
    return ((rows >> (lanes >> 4)) & (banks >> ((lanes >> 2) & 3)) & 1).astype(bool)


class Dpp:
    """The first source of a DPP instruction, and the lanes that the instruction writes.

    If the source lane does not exist or is inactive, the lane reads 0 with bound_ctrl; without bound_ctrl, it is not
    written. With fi, inactive source lanes are read.
    """

    def __init__(self, c: Compiling) -> None:
        self.source, self.exists = dpp_source(c)
        self.enabled = dpp_enabled(c)
        self.zero = bool(c.take("bound_ctrl", 0))
        self.fetch_inactive = bool(c.take("fi", 0))

    def move(self, state: State, value: np.ndarray) -> np.ndarray:
        value = np.broadcast_to(value, (state.count, state.lanes))
        return np.where(self._valid(state), value[:, self.source], value.dtype.type(0))

    def _valid(self, state: State) -> np.ndarray:
        if self.fetch_inactive or state.full:
            return self.exists
        return self.exists & state.x[:, self.source]

    def written(self, state: State) -> np.ndarray:
        """The lanes that the instruction writes: bool [waves, lanes]."""
        lanes = self.enabled if self.zero else self.enabled & self._valid(state)
        return state.x & lanes


def compile_lanes(c: Compiling) -> Step | None:
    for family in (_read_lane, _write_lane, _permlanex, _swap):
        if step := family(c):
            return step
    return None


def _read_lane(c: Compiling) -> Step | None:
    if c.base not in ("v_readfirstlane_b32", "v_readlane_b32"):
        return None
    write, register = put(c, c.operands[0]), c.operands[1].register
    if c.operands[1].kind != "v":
        raise c.refuse("the source is not a vector register")
    if c.base == "v_readfirstlane_b32":

        def first(state: State) -> None:
            lane = 0 if state.full else state.x.argmax(1)
            write(state, state.v[register][np.arange(state.count), lane])

        return first
    select, mask = scalar_reader(c.operands[2], "u"), u32(c.target.lanes - 1)
    return lambda state: write(state, state.v[register][np.arange(state.count), select(state) & mask])


def _write_lane(c: Compiling) -> Step | None:
    if c.base != "v_writelane_b32":
        return None
    value, select = (scalar_reader(operand, "u") for operand in c.operands[1:])
    register, mask = c.operands[0].register, u32(c.target.lanes - 1)

    def step(state: State) -> None:
        state.v[register][np.arange(state.count), select(state) & mask] = value(state)

    return step


def _permlanex(c: Compiling) -> Step | None:
    """v_permlane16 and v_permlanex16: every lane reads a lane of the same row or of the other row. Two scalar
    operands contain a 4-bit index for every lane of a row. The first bit of op_sel enables reading inactive lanes. If
    the second bit is set, a lane whose source is inactive reads 0."""
    if c.base not in ("v_permlane16_b32", "v_permlanex16_b32"):
        return None
    if c.target.cdna:
        raise c.refuse("the instruction exists only on RDNA")
    low, high = (scalar_reader(operand, "u") for operand in c.operands[2:4])
    options = c.take("op_sel", (0, 0))
    fetch_inactive, zero = bool(options[0]), bool(options[1])
    target, source = c.operands[0].register, c.operands[1].register
    lanes = np.arange(c.target.lanes)
    row = (lanes & ~15) ^ (16 if "x16" in c.base else 0)
    shift = (lanes & 15).astype(u64) * u64(4)

    def step(state: State) -> None:
        select = low(state) | high(state).astype(u64) << u64(32)
        places = row + (select[:, None] >> shift & u64(15)).astype(i64)
        places = np.broadcast_to(places, (state.count, state.lanes))
        value = np.take_along_axis(state.v[source], places, 1)
        if fetch_inactive or state.full:
            state.put(target, value)
            return
        valid = np.take_along_axis(state.x, places, 1)
        kept = u32(0) if zero else state.v[target]
        state.put(target, np.where(valid, value, kept))

    return step


def _swap(c: Compiling) -> Step | None:
    """v_permlane16_swap and v_permlane32_swap: swap odd rows (or the upper half) of one register with even rows (or the
    lower half) of the other."""
    sizes = {"v_permlane16_swap_b32": 16, "v_permlane32_swap_b32": 32}
    if c.base not in sizes:
        return None
    size = sizes[c.base]
    if c.take("fi") or c.take("bound_ctrl"):
        raise c.refuse("fi and bound_ctrl are not implemented")
    first, second = (operand.register for operand in c.operands)

    def step(state: State) -> None:
        if not state.full:
            raise c.refuse("inactive lanes are not implemented")
        a = state.v[first].reshape(state.count, -1, 2, size)
        b = state.v[second].reshape(state.count, -1, 2, size)
        upper = a[:, :, 1].copy()
        a[:, :, 1] = b[:, :, 0]
        b[:, :, 0] = upper

    return step


def swizzle_source(c: Compiling) -> np.ndarray:
    """The source lane of every lane in ds_swizzle_b32, decoded from the offset."""
    lanes = np.arange(c.target.lanes)
    offset = c.take("offset", 0)
    if isinstance(offset, int):
        if offset & 0x8000:
            return (lanes & ~3) + (offset >> 2 * (lanes & 3) & 3)
        and_mask, or_mask, xor_mask = offset & 31, offset >> 5 & 31, offset >> 10 & 31
        return (lanes & ~31) + (((lanes & 31) & and_mask | or_mask) ^ xor_mask)
    name, _, rest = offset.removeprefix("swizzle(").rstrip(")").partition(",")
    return _named_swizzle(c, name, rest, lanes)


def _named_swizzle(c: Compiling, name: str, rest: str, lanes: np.ndarray) -> np.ndarray:
    if name == "BITMASK_PERM":
        source = lanes & ~31
        for place, character in enumerate(rest.strip('"')):
            bit = lanes >> (4 - place) & 1
            value = {"0": 0 * bit, "1": 0 * bit + 1, "p": bit, "i": 1 - bit}[character]
            source = source + (value << (4 - place))
        return source
    numbers = [int(part, 0) for part in rest.split(",")]
    if name == "SWAP":
        return lanes ^ numbers[0]
    if name == "REVERSE":
        return lanes ^ (numbers[0] - 1)
    if name == "BROADCAST":
        return (lanes & -numbers[0]) + numbers[1]
    if name == "QUAD_PERM":
        return (lanes & ~3) + np.array(numbers)[lanes & 3]
    raise c.refuse(f"swizzle {name} is not implemented")
