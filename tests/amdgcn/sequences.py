"""Check known instruction sequences without executing them, because errors in them rarely change results.

A float32 division uses v_div_scale, v_div_fmas and v_div_fixup; a wrong step changes the last bit of a few quotients. A
conversion from float32 to bfloat16 without a conversion instruction adds half of the last kept bit (or slightly less if
that bit is 0) and handles NaN separately; a wrong step affects only ties and NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.amdgcn.machine import Program
from tests.amdgcn.machine.operands import SCALAR, VCC, parse
from tests.amdgcn.machine.text import Instruction
from tests.amdgcn.values import Values

# Operations with a constant: the required constant, or None for any constant.
_WITH_CONSTANTS = {"product": None, "plus": None, "masked": 0xFFFF0000, "shifted": 16}
DIVISION = "the division that ends here is not rounded correctly"
# NaN in bfloat16, and the same bits before the shift.
_NAN = (0x7FFF, 0x7FFF0000)


def wrong(program: Program) -> Iterator[tuple[int, str]]:
    """Yield (index, error) for every wrong sequence."""
    values = Values()
    # Number that is rounded → index of the instruction that reads its lowest kept bit.
    halves: dict[int, int] = {}
    rounded = set[int]()
    constants = _constant_registers(program)
    for index, instruction, name in values.walk(program):
        if name == "v_div_fixup_f32" and not _is_division(values, *values.operands(instruction)):
            yield index, DIVISION
        source = _lowest(values, values.result(name, instruction))
        if source is not None:
            halves[source] = index
        if name in ("v_cndmask_b32", "v_cndmask_b32_sdwa"):
            source = _converted(values, instruction, constants)
            if source == -1:
                yield index, "the conversion to bfloat16 that ends here is wrong"
            elif source is not None:
                rounded.add(source)
    for source in halves.keys() - rounded:
        yield halves[source], "the conversion to bfloat16 that begins here does not end"


def _constant_registers(program: Program) -> frozenset[int]:
    """The registers to which a constant of a conversion is written anywhere in the program, such as before a loop."""
    moves = (move for move in program.instructions if move.mnemonic.startswith(("v_mov", "s_mov")))
    copies = [move for move in moves if move.operands[-1] in map(hex, _NAN)]
    return frozenset[int]().union(*(parse(move.operands[0]).registers for move in copies))


def _is_division(values: Values, quotient: int, denominator: int, numerator: int) -> bool:
    scaled = values.of("v_div_scale_f32", denominator, denominator, numerator)
    dividend = values.of("v_div_scale_f32", numerator, denominator, numerator)
    negative, one = values.of("negative", scaled), values.constant(0x3F800000)
    first = values.of("v_rcp_f32", scaled)
    inverse = values.fused(values.fused(negative, first, one), first, first)
    estimate = values.product(dividend, inverse)
    estimate = values.fused(values.fused(negative, estimate, dividend), inverse, estimate)
    left = values.fused(negative, estimate, dividend)
    flag = values.of("flag", dividend)
    pairs = (left, inverse), (inverse, left)
    return quotient in (values.of("v_div_fmas_f32", *pair, estimate, flag) for pair in pairs)


def _lowest(values: Values, result: int | None) -> int | None:
    """The number whose lowest bit in bfloat16 is this result, or None if the result is something else."""
    key = values.keys[result] if result is not None else ()
    if key[:1] != ("masked",):
        return None
    for bit, mask in (key[1:], key[:0:-1]):
        shift = values.keys[bit]
        if mask == values.constant(1) and shift[0] == "shifted" and shift[2] == values.constant(16):
            source: int = shift[1]
            return source
    return None


def _converted(values: Values, instruction: Instruction, constants: frozenset[int]) -> int | None:
    """The number whose conversion ends with this v_cndmask; -1 if the conversion is wrong, None if it is not a
    conversion."""
    nan, rounded = values.operands(instruction)[:2]
    compares = "v_cmp_o_f32", "v_cmp_o_f16"
    is_constant = nan in map(values.constant, _NAN)
    if rounded in map(values.constant, _NAN):
        nan, rounded, compares = rounded, nan, ("v_cmp_u_f32", "v_cmp_u_f16")
    if nan not in {*map(values.constant, _NAN)} | {values.of("register", register) for register in constants}:
        return None
    mask = values.value(parse(instruction.operands[3])) if len(instruction.operands) > 3 else None
    mask = values.registers.get(SCALAR + VCC) if mask is None else mask
    compared = values.keys[mask] if mask is not None else ()
    # the result of a comparison before a label is unknown, and counts as correct
    ordered = compared[:1] in ((), ("register",)) or (compared[0] in compares and compared[1] == compared[2])
    source = next(iter(_sources(values, rounded, constants)), None) if ordered else None
    shifted = values.keys[rounded][0] == "shifted" or "sdwa" in instruction.mnemonic
    if source is not None and (shifted or nan != values.constant(_NAN[0])):
        return source
    core = values.keys[rounded]
    while core[0] == "shifted":
        core = values.keys[core[1]]
    is_error = is_constant and core[0] not in ("written", "register")
    return -1 if is_error else None


def _sources(values: Values, value: int, constants: frozenset[int]) -> Iterator[int]:
    """The numbers from which a value may have been rounded. The value is the sum of such a number and the rounding
    terms, or the upper half of this sum; signs and factors may be merged into it."""
    name, *parts = values.keys[value]
    numbers = [part for part in parts if name in _WITH_CONSTANTS and values.keys[part][0] == "constant"]
    if name == "negative" or (numbers and _WITH_CONSTANTS[name] in (None, values.keys[numbers[0]][1])):
        for part in parts:
            if part not in numbers:
                yield from _sources(values, part, constants)
    if name == "sum":
        for source in set(parts):
            left = list(parts)
            left.remove(source)
            low = values.field(source, values.constant(16), values.constant(1))
            if low in left:
                left.remove(low)
                biases = {values.constant(_NAN[0]), *(values.of("register", register) for register in constants)}
                if len(left) == 1 and left[0] in biases:
                    yield source
