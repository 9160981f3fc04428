"""Parse the assembly text that Triton emits: instructions, labels, the kernel descriptor and the arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .errors import UnknownInstruction

_MNEMONIC = re.compile(r"(?:s|v|ds|global|buffer|flat|scratch)_\w+")
_LABEL = re.compile(r"([.\w$]+):")
_DIRECTIVE = re.compile(r"\.amdhsa_(\w+)\s+(\w+)")
_ARGUMENT = re.compile(r"\.offset:\s*(\d+)\s+\.size:\s*(\d+)\s+\.value_kind:\s*(\w+)")
_MODIFIER = re.compile(r"([a-z_][a-z_0-9]*):(.+)")

# Modifiers of one word. Any other word after the operands must have the form `name:value`.
FLAGS = {
    "offen",
    "idxen",
    "clamp",
    "glc",
    "slc",
    "dlc",
    "sc0",
    "sc1",
    "nt",
    "lds",
    "gds",
    "row_mirror",
    "row_half_mirror",
}

# Instructions that have one expression instead of a list of operands.
_PHRASES = ("s_waitcnt", "s_delay_alu", "s_sendmsg", "s_wait_event", "s_waitcnt_depctr", "s_wait_alu")


@dataclass(frozen=True)
class Instruction:
    """One line of assembly. second: the other half of a `v_dual_` pair."""

    text: str
    mnemonic: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, Any] = field(default_factory=dict)
    second: Instruction | None = None


@dataclass(frozen=True)
class Argument:
    """One kernel argument, possibly a hidden one, from the metadata."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Source:
    """A kernel's parsed text. labels: the instruction index of every label. entry: the index of the instruction at
    which a launch with preloaded arguments starts, after the instructions that load them; 0 if the kernel does not
    support preloading."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    descriptor: Mapping[str, int]
    arguments: tuple[Argument, ...]
    entry: int


def read(text: str) -> Source:
    """Parse the first kernel in the assembly."""
    end = text.index(".amdhsa_kernel")
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    aligned: list[int] = []
    for line in _lines(text[:end]):
        if match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
            line = line[match.end() :].strip()
        if line.startswith(".p2align"):
            aligned.append(len(instructions))
        if _MNEMONIC.match(line):
            instructions.append(instruction(line))
    descriptor = {name: int(value, 0) for name, value in _DIRECTIVE.findall(text[end:]) if value[0].isdigit()}
    preloads = descriptor.get("user_sgpr_kernarg_preload_length", 0)
    entry = next((index for index in aligned if index), 0) if preloads else 0
    name = text[end:].split(None, 2)[1]
    return Source(name, tuple(instructions), labels, descriptor, tuple(_arguments(text)), entry)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        line = line.split(";", 1)[0].split("//", 1)[0].strip()
        if line:
            yield line


def _arguments(text: str) -> Iterator[Argument]:
    start = text.find(".args:")
    if start >= 0:
        for offset, size, kind in _ARGUMENT.findall(text[start : text.index(".kernarg_segment_size", start)]):
            yield Argument(int(offset), int(size), kind)


@cache
def instruction(line: str) -> Instruction:
    """Parse one line, such as `v_add_f32_dpp v4, v4, v4 row_shr:8 row_mask:0xf bank_mask:0xf`."""
    line = " ".join(line.split())
    if " :: " in line:
        first, second = (instruction(half.strip()) for half in line.split(" :: "))
        return Instruction(line, first.mnemonic, first.operands, first.modifiers, second)
    mnemonic, _, rest = line.partition(" ")
    if mnemonic in _PHRASES:
        return Instruction(line, mnemonic, (rest,))
    operands = _split(rest, ",")
    modifiers: dict[str, Any] = {}
    if operands:
        first, *words = _split(operands.pop(), " ")
        if _is_modifier(first):
            words.insert(0, first)
        else:
            operands.append(first)
        for word in words:
            name, value = _modifier(word, line)
            modifiers[name] = value
    return Instruction(line, mnemonic, tuple(operands), modifiers)


def _is_modifier(word: str) -> bool:
    return word in FLAGS or (":" in word and "[" not in word.split(":", 1)[0])


def _modifier(word: str, line: str) -> tuple[str, Any]:
    if word in FLAGS:
        return word, True
    match = _MODIFIER.fullmatch(word)
    if not match:
        raise UnknownInstruction(f"{line!r}: {word!r} is neither an operand nor a modifier")
    name, value = match[1], match[2]
    if value.startswith("["):
        return name, tuple(int(item, 0) for item in value[1:-1].split(","))
    try:
        return name, int(value, 0)
    except ValueError:
        return name, value


def _split(text: str, separator: str) -> list[str]:
    """Split text at separators outside brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        elif character == separator and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]
