"""Compare the decoded instructions of a code object with the assembly that was executed.

Triton assembles the text, so this detects errors in parsing it, such as a missing line, and text that does not
belong to the binary. The decoder is tinygrad's, generated from AMD's machine-readable ISA documents.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Instructions that have different names in the assembler and in the documents.
_OTHER_NAMES = {
    "v_accvgpr_write_b32": "v_accvgpr_write",
    "v_accvgpr_read_b32": "v_accvgpr_read",
    "v_fma_mix_f32": "v_mad_mix_f32",
    "v_fmaak_f32": "v_madak_f32",
    "v_fmamk_f32": "v_madmk_f32",
    "v_fma_mixlo_f16": "v_mad_mixlo_f16",
    "v_fma_mixhi_f16": "v_mad_mixhi_f16",
}
# Instructions whose result is a scalar register, although the documents describe it as a vector register.
_WRITES_SCALARS = {"v_readlane_b32", "v_readfirstlane_b32"}
_ENCODING = re.compile(r"_(e32|e64|dpp|dpp8|sdwa|e64_dpp|lit|vop3|vop3_sdst)$")
_REGISTER = re.compile(r"(?<![\w.])([vsa])(?:(\d+)|\[(\d+):(\d+)\])(?![\w.])")
_MATRIX_GFX90A = {
    "v_mfma_f32_32x32x2f32": 0x44,
    "v_mfma_f32_16x16x4f32": 0x45,
    "v_mfma_f32_32x32x8f16": 0x4C,
    "v_mfma_f32_16x16x16f16": 0x4D,
    "v_mfma_f32_32x32x8bf16_1k": 0x66,
    "v_mfma_f32_16x16x16bf16_1k": 0x67,
}
_NOP = 0xBF800000
# The encodings of s_code_end and s_nop.
_PADDING = {0xBF9F0000, 0xBF800000}


class Mismatch(AssertionError):
    """The text and the code object differ."""


def available() -> bool:
    """Whether the decoder is installed. Only tests need it."""
    from importlib.util import find_spec

    return find_spec("tinygrad") is not None


def compare(text: Sequence[str], binary: bytes, arch: str) -> int:
    """Compare a code object with these instructions and return their number. Raises `Mismatch` if they differ.

    The opcode and the first register of every operand are compared. Padding between the parts of a function
    (s_nop) is skipped, and only padding may follow the last instruction.
    """
    family = "cdna" if arch.startswith("gfx9") else "rdna3" if arch.startswith("gfx11") else "rdna4"
    code, offset = section(binary, b".text"), 0
    for line in text:
        mnemonic = line.split(None, 1)[0]
        if arch == "gfx90a" and mnemonic.startswith("v_mfma_"):
            offset = _matrix_of_gfx90a(line, mnemonic, code, offset)
            continue
        decoded = _decode(code, offset, family)
        while _name(decoded) == "s_nop" != mnemonic:
            offset += decoded.size()
            decoded = _decode(code, offset, family)
        _check_same(line, mnemonic, decoded, offset)
        offset += decoded.size()
    rest = code[offset:]
    for (word,) in struct.iter_unpack("<I", rest):
        if word not in _PADDING:
            raise Mismatch(f"at {offset:#x} the code object has more code than the text: {word:#x}")
    return len(text)


def compare_once(text: Sequence[str], binary: bytes, arch: str, stamp: Path) -> None:
    """Compare, unless the decoder is missing or the stamp records an earlier comparison of the same files by the same
    code."""
    digest = hashlib.sha256("\n".join(text).encode() + binary + Path(__file__).read_bytes()).hexdigest()
    if not available() or (stamp.exists() and stamp.read_text() == digest):
        return
    compare(text, binary, arch)
    draft = stamp.with_suffix(f".draft{os.getpid()}")
    draft.write_text(digest)
    draft.replace(stamp)


def _matrix_of_gfx90a(line: str, mnemonic: str, code: bytes, offset: int) -> int:
    """Compare one of CDNA 2's matrix instructions, which the decoder mistakes for those of CDNA 3. Returns the next
    offset.

    Source of the opcodes and fields: AMD Instinct MI200 ISA, VOP3P-MAI.
    """
    low, high = struct.unpack_from("<II", code, offset)
    while low == _NOP:
        offset += 4
        low, high = struct.unpack_from("<II", code, offset)
    named = [number for _, number in _registers(line)]
    fields = {low & 0xFF, high & 0xFF, high >> 9 & 0xFF, high >> 18 & 0xFF}
    if low >> 23 != 0x1A7 or low >> 16 & 0x7F != _MATRIX_GFX90A.get(mnemonic) or not fields.issuperset(named):
        raise Mismatch(f"at {offset:#x} the text has {line!r}, the code {low:#010x} {high:#010x}")
    return offset + 8


def section(binary: bytes, name: bytes) -> bytes:
    """The contents of one section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    count, names = struct.unpack_from("<HH", binary, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, table + 64 * index) for index in range(count)]
    for title, _, _, _, offset, size, *_ in headers:
        start = headers[names][4] + title
        if binary[start : binary.index(b"\0", start)] == name:
            return binary[offset : offset + size]
    raise Mismatch(f"the code object has no section {name.decode()}")


def _decode(code: bytes, offset: int, family: str) -> Any:
    """Decode the instruction at an offset. RDNA's buffer instructions are decoded separately, because `decode_inst`
    does not try their encoding."""
    from tinygrad.renderer.amd import decode_inst

    data = code[offset : offset + 20]
    try:
        return decode_inst(data, family)
    except (ValueError, AssertionError) as error:
        if family == "rdna3":
            from tinygrad.runtime.autogen.amd.rdna3.ins import MUBUF as Buffer
        elif family == "rdna4":
            from tinygrad.runtime.autogen.amd.rdna4.ins import VBUFFER as Buffer
        else:
            raise Mismatch(f"no instruction at {offset:#x}: {error}") from error
        encoding = dict(Buffer._fields)["encoding"]
        word = int.from_bytes(data[:4], "little")
        if len(data) < 8 or word >> 26 != encoding.default:
            raise Mismatch(f"no instruction at {offset:#x}: {error}") from error
        return Buffer.from_bytes(data)


def _name(decoded: Any) -> str:
    if type(decoded).__name__.startswith("VOPD"):
        return f"{decoded.opx.name} :: {decoded.opy.name}".lower()
    return str(decoded.op_name.lower())


def _check_same(line: str, mnemonic: str, decoded: Any, offset: int) -> None:
    expected = mnemonic
    if "::" in line:
        expected = f"{mnemonic} :: {line.split('::')[1].split()[0]}"
    expected = " :: ".join(_plain(part) for part in expected.split(" :: "))
    actual = " :: ".join(_plain(part) for part in _name(decoded).split(" :: "))
    if expected != actual:
        raise Mismatch(f"at {offset:#x} the text has {line!r}, the code {actual}")
    named, coded = set(_registers(line)), set(_fields(decoded))
    if actual in _WRITES_SCALARS:
        named, coded = ({("s", number) for _, number in registers} for registers in (named, coded))
    missing = named - coded
    if missing:
        raise Mismatch(f"at {offset:#x} the text has {line!r}, the code {decoded!r} without {sorted(missing)}")


def _plain(name: str) -> str:
    while (shorter := _ENCODING.sub("", name)) != name:
        name = shorter
    return _OTHER_NAMES.get(name, name)


def _registers(line: str) -> Iterator[tuple[str, int]]:
    """The first register of every operand in the text: (v or s, number)."""
    for kind, single, first, _ in _REGISTER.findall(line.partition(" ")[2]):
        yield "s" if kind == "s" else "v", int(single or first)


# SDWA fields that name a vector register, and the bits that make them name a scalar register instead.
_SCALAR_BIT = {"vsrc0": "s0", "vsrc1": "s1"}


def _fields(decoded: Any) -> Iterator[tuple[str, int]]:
    """The registers of a decoded instruction."""
    for name, _ in decoded._fields:
        value = getattr(decoded, name)
        if name in _SCALAR_BIT and getattr(decoded, _SCALAR_BIT[name], 0):
            yield "s", value.offset - 256
        elif hasattr(value, "offset"):
            yield ("v", value.offset - 256) if value.offset >= 256 else ("s", value.offset)
        elif isinstance(value, int) and not isinstance(value, bool):
            # a register number in a field that the documents describe as plain bits
            yield "s", value
            yield "v", value
