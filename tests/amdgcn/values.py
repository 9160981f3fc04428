"""Symbolic values of a program's registers, as expressions of a few operations, to compare instruction sequences.

Values are numbers: equal numbers mean equal expressions. A value from an unknown operation is a new symbol. At the
target of a branch, the contents of the registers are unknown, and every register has its own symbol as its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.amdgcn import flow
from tests.amdgcn.machine import Program
from tests.amdgcn.machine.operands import SCALAR, VCC, Operand, parse
from tests.amdgcn.machine.text import Instruction

_COPIES = ("v_mov_b32", "s_mov_b32", "s_mov_b64", "s_movk_i32")
_SUMS = ("v_add_u32", "v_add_nc_u32", "v_add3_u32")
# Maximum number of summands in a sum.
_LEAVES = 4
_SIGN = 0x80000000
_UPPER = {"dst_sel": "DWORD", "dst_unused": "UNUSED_PAD", "src0_sel": "WORD_1", "src1_sel": "DWORD"}


class Values:
    """Walk through a program once and track the values of its registers."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.keys: list[tuple[Any, ...]] = []
        self.registers: dict[int, int] = {}

    def of(self, *key: Any) -> int:
        """Return the number of an expression."""
        number = self.numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def walk(self, program: Program) -> Iterator[tuple[int, Instruction, str]]:
        """Yield the index of every instruction, the instruction, and its name without `dual_`, `_e32` and `_e64`.
        Results are recorded afterwards. A dual instruction is yielded as its two halves, with the same index."""
        branch_targets = {
            program.source.labels[instruction.operands[0]]
            for instruction in program.instructions
            if instruction.mnemonic.startswith(("s_branch", "s_cbranch"))
        }
        for index, instruction in enumerate(program.instructions):
            if index in branch_targets:
                self.registers = {}
            written: dict[int, int] = {}
            for half in [instruction, instruction.second] if instruction.second else [instruction]:
                name = half.mnemonic.replace("v_dual_", "v_").removesuffix("_e32").removesuffix("_e64")
                yield index, half, name
                result = self.result(name, half)
                for place, register in enumerate(sorted(flow.writes(half))):
                    written[register] = self.of("written", index, place) if result is None else result
                if result is not None and name.startswith("v_div_scale"):
                    flag = self.of("flag", result)
                    written |= dict.fromkeys(parse(half.operands[1]).registers, flag)
            self.registers |= written

    def result(self, name: str, instruction: Instruction) -> int | None:
        """The result of an instruction, or None if its operation or one of its modifiers is not implemented here, or if
        it is a sum with too many summands."""
        if name == "v_and_b32_sdwa" and instruction.modifiers == _UPPER:
            upper, mask = self.operands(instruction)
            return self.masked(self.shifted(upper, self.constant(16)), mask)
        if instruction.modifiers:
            return None
        if name in _COPIES:
            return self.operands(instruction)[0]
        if name == "v_xor_b32" and self.constant(_SIGN) in (values := self.operands(instruction)):
            return self.of("negative", values[values[0] == self.constant(_SIGN)])
        if name in ("v_fma_f32", "v_fmac_f32"):
            first, second, *third = self.operands(instruction)
            return self.fused(first, second, *third or [self.value(parse(instruction.operands[0]))])
        if name == "v_mul_f32":
            return self.product(*self.operands(instruction))
        if name in _SUMS:
            return self.total(*self.operands(instruction))
        if name == "v_div_fmas_f32":
            return self.of(name, *self.operands(instruction), self.registers.get(SCALAR + VCC, -1))
        if name.startswith("v_div_scale"):
            return self.of(name, *self.operands(instruction, 2))
        if name in ("v_rcp_f32", "v_cmp_o_f32", "v_cmp_o_f16", "v_cmp_u_f32", "v_cmp_u_f16"):
            return self.of(name, *self.operands(instruction))
        if name == "v_bfe_u32":
            return self.field(*self.operands(instruction))
        if name == "v_add_f32":
            return self.of("plus", *sorted(self.operands(instruction)))
        if name in ("v_lshrrev_b32", "v_ashrrev_i32"):
            return self.shifted(*reversed(self.operands(instruction)))
        if name == "s_lshr_b32":
            return self.shifted(*self.operands(instruction))
        # This is treated as a sum, which it equals if no bit is set in both parts.
        if name == "v_and_or_b32":
            first, second, third = self.operands(instruction)
            return self.total(self.masked(first, second), third)
        if name == "v_and_b32":
            return self.masked(*self.operands(instruction))
        return None

    def operands(self, instruction: Instruction, first: int = 1) -> list[int]:
        """The values of the source operands. first: the index of the first one."""
        return [self.value(parse(word)) for word in instruction.operands[first:]]

    def value(self, operand: Operand) -> int:
        if operand.kind not in ("v", "s"):
            return self.of("constant", operand.value & 0xFFFFFFFF if operand.kind == "constant" else operand.text)
        register = min(operand.registers)
        value = self.registers.get(register, self.of("register", register))
        value = self.of("absolute", value) if operand.absolute else value
        return self.of("negative", value) if operand.negate else value

    def constant(self, bits: int) -> int:
        return self.of("constant", bits)

    def product(self, first: int, second: int) -> int:
        return self.of("product", min(first, second), max(first, second))

    def fused(self, first: int, second: int, third: int) -> int:
        return self.of("fused", self.product(first, second), third)

    def shifted(self, value: int, places: int) -> int:
        return self.of("shifted", value, places)

    def masked(self, first: int, second: int) -> int:
        return self.of("masked", min(first, second), max(first, second))

    def field(self, value: int, first: int, bits: int) -> int:
        """The value of a bit field. A field of one bit is expressed as a shift and a mask."""
        if bits == self.constant(1):
            return self.masked(self.shifted(value, first), bits)
        return self.of("field", value, first, bits)

    def total(self, *values: int) -> int | None:
        """The value of a sum, independent of the order of the summands; None if there are too many."""
        leaves = [leaf for value in values for leaf in self.leaves(value)]
        return self.of("sum", *sorted(leaves)) if len(leaves) <= _LEAVES else None

    def leaves(self, value: int) -> tuple[int, ...]:
        key = self.keys[value]
        return key[1:] if key[0] == "sum" else (value,)
