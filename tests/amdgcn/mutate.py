"""One-instruction faults in machine code, like those that a bug in a compiler or in this project could cause."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_REGISTER = re.compile(r"(?<![\w.])([vs])(\d+)(?!\w)")
_CONSTANT = re.compile(r"(?<=[ ,])(-?\d+|0x[0-9a-f]+)(?=$|,| )")
_OFFSET = re.compile(r"\boffset:(\d+)")

# Opcode -> another opcode with the same operands.
_SWAPPED = {
    "v_add_f32": "v_sub_f32",
    "v_sub_f32": "v_add_f32",
    "v_mul_f32": "v_add_f32",
    "v_pk_mul_f32": "v_pk_add_f32",
    "v_pk_add_f32": "v_pk_mul_f32",
    "v_max_f32": "v_min_f32",
    "v_min_f32": "v_max_f32",
    "v_max_num_f32": "v_min_num_f32",
    "v_add_u32": "v_sub_u32",
    "v_add_nc_u32": "v_sub_nc_u32",
    "v_or_b32": "v_and_b32",
    "v_and_b32": "v_or_b32",
    "v_xor_b32": "v_or_b32",
    "v_lshlrev_b32": "v_lshrrev_b32",
    "v_lshrrev_b32": "v_lshlrev_b32",
    "s_add_i32": "s_sub_i32",
    "s_add_u32": "s_sub_u32",
    "s_sub_i32": "s_add_i32",
    "s_and_b32": "s_or_b32",
    "s_or_b32": "s_and_b32",
    "s_and_b64": "s_or_b64",
    "s_or_b64": "s_and_b64",
    "s_and_saveexec_b64": "s_or_saveexec_b64",
    "s_and_saveexec_b32": "s_or_saveexec_b32",
    "s_lshl_b32": "s_lshr_b32",
    "s_cbranch_scc0": "s_cbranch_scc1",
    "s_cbranch_scc1": "s_cbranch_scc0",
    "s_cbranch_vccnz": "s_cbranch_vccz",
    "s_cbranch_vccz": "s_cbranch_vccnz",
    "s_cbranch_execz": "s_cbranch_execnz",
    "v_rcp_f32": "v_rsq_f32",
    "v_rsq_f32": "v_rcp_f32",
    "v_exp_f32": "v_log_f32",
}
_COMPARED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "lg": "eq"}
_ENCODINGS = ("_e32", "_e64", "_dpp", "_sdwa", "_e64_dpp")


@dataclass(frozen=True)
class Fault:
    """One change. index: the position of the instruction in the code. kind: a key of `KINDS`."""

    index: int
    kind: str
    before: str
    after: str


def draw(index: int, instruction: str, rng: random.Random) -> Fault | None:
    """Draw a fault for one instruction; None if no kind of change applies."""
    kinds = list(KINDS.items())
    rng.shuffle(kinds)
    for kind, change in kinds:
        after = change(instruction, rng)
        if after is not None and after != instruction:
            return Fault(index, kind, instruction, after)
    return None


def _wait(text: str, rng: random.Random) -> str | None:
    """Omit a wait."""
    if text.startswith(("s_waitcnt_depctr", "s_wait_alu")):
        return None
    if text.startswith("s_wait_") or text.startswith("s_waitcnt"):
        return "s_nop 0"
    return None


def _barrier(text: str, rng: random.Random) -> str | None:
    return "s_nop 0" if text.startswith(("s_barrier", "s_barrier_wait")) and "signal" not in text else None


def _lanes(text: str, rng: random.Random) -> str | None:
    """Change the DPP control or the swizzle pattern."""
    if "quad_perm:[" in text:
        other = rng.choice(["quad_perm:[0,1,2,3]", "quad_perm:[3,2,1,0]", "quad_perm:[2,2,3,3]"])
        return re.sub(r"quad_perm:\[[\d,]+\]", other, text)
    if match := re.search(r"\b(row_(?:shr|shl|ror|share|xmask)):(\d+)", text):
        return text.replace(match[0], f"{match[1]}:{int(match[2]) % 15 + 1}")
    if match := re.search(r"row_bcast:(\d+)", text):
        return text.replace(match[0], "row_bcast:31" if match[1] == "15" else "row_bcast:15")
    if "row_mirror" in text:
        return text.replace("row_mirror", "row_half_mirror")
    if "row_half_mirror" in text:
        return text.replace("row_half_mirror", "row_mirror")
    if match := re.search(r"swizzle\(([A-Z]+),(\d+)\)", text):
        return text.replace(match[0], f"swizzle({match[1]},{int(match[2]) // 2 or 16})")
    return None


def _mask(text: str, rng: random.Random) -> str | None:
    """Change the row mask, swap the two values of a selection, or change a comparison."""
    if "row_mask:0xa" in text:
        return text.replace("row_mask:0xa", "row_mask:0x5")
    if text.startswith("v_cndmask_b32") and "::" not in text:
        name, _, rest = text.partition(" ")
        parts = rest.split(", ")
        if len(parts) >= 3 and parts[1].startswith("v") and parts[2].startswith("v"):
            parts[1], parts[2] = parts[2], parts[1]
            return f"{name} {', '.join(parts)}"
    if match := re.match(r"(v_cmpx?|s_cmp)_(lt|le|gt|ge|eq|ne|lg)_", text):
        return text.replace(match[0], f"{match[1]}_{_COMPARED[match[2]]}_", 1) if match[2] != "lg" else None
    return None


def _address(text: str, rng: random.Random) -> str | None:
    """Change the offset of a load or store."""
    if not text.startswith(("ds_read", "ds_write", "ds_load", "ds_store", "global_", "buffer_")):
        return None
    if match := _OFFSET.search(text):
        return text.replace(match[0], f"offset:{int(match[1]) + rng.choice([4, 8, 16])}")
    if "offset0" in text or text.startswith("ds_bpermute"):
        return None
    return f"{text} offset:{rng.choice([4, 8, 16])}"


def _operand(text: str, rng: random.Random) -> str | None:
    """Replace a source with another register."""
    if text.startswith(("s_wait", "s_branch", "s_cbranch", "s_load", "s_nop", "s_barrier")) or "::" in text:
        return None
    first = text.find(",")
    matches = [match for match in _REGISTER.finditer(text) if match.start() > first >= 0]
    if not matches:
        return None
    match = rng.choice(matches)
    other = max(0, int(match[2]) + rng.choice([-2, -1, 1, 2]))
    return text[: match.start()] + f"{match[1]}{other}" + text[match.end() :]


def _result(text: str, rng: random.Random) -> str | None:
    """Replace the destination with another register."""
    match = re.match(r"(v_\w+ )v(\d+)(?=,)", text)
    if match is None or "::" in text:
        return None
    return f"{match[1]}v{int(match[2]) + 1}{text[match.end() :]}"


def _constant(text: str, rng: random.Random) -> str | None:
    """Change a constant."""
    if text.startswith(("s_wait", "s_nop", "s_clause", "s_delay", "s_setprio", "s_sendmsg", "s_barrier")):
        return None
    operands = text.split(" offset", 1)[0]
    matches = [match for match in _CONSTANT.finditer(operands) if match.start() > text.find(",") >= 0]
    if not matches:
        return None
    match = rng.choice(matches)
    value = int(match[1], 0)
    other = value ^ 1 << rng.randrange(max(1, abs(value).bit_length())) if value > 0 else value + 1
    return text[: match.start()] + (hex(other) if match[1].startswith("0x") else str(other)) + text[match.end() :]


def _opcode(text: str, rng: random.Random) -> str | None:
    """Replace the operation, but keep the operands."""
    name, space, rest = text.partition(" ")
    encoding = next((suffix for suffix in _ENCODINGS if name.endswith(suffix)), "")
    plain = name[: len(name) - len(encoding)]
    return f"{_SWAPPED[plain]}{encoding}{space}{rest}" if plain in _SWAPPED and "::" not in text else None


KINDS: dict[str, Callable[[str, random.Random], str | None]] = {
    "a wait left out": _wait,
    "a barrier left out": _barrier,
    "other lanes": _lanes,
    "another mask": _mask,
    "another address": _address,
    "another operand": _operand,
    "another destination": _result,
    "another constant": _constant,
    "another operation": _opcode,
}


def drawn(instructions: list[str], reached: list[int], rng: random.Random) -> Iterator[Fault]:
    """Yield random faults indefinitely, in instructions that a case reaches. The kinds of change are weighted by how
    often they apply."""
    while True:
        index = rng.choice(reached)
        fault = draw(index, instructions[index], rng)
        if fault is not None:
            yield fault
