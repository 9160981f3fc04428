"""C, C++ and CUDA sources: a table of includes, and what no translator turns into HIP."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hf_rocm.porting.findings import Place, Rule, Severity
from hf_rocm.porting.libraries import by_header

HEADER = Rule("cuda-header", Severity.WARNING, "this library has no translation by hipify", "")
TRANSLATED = Rule("hipified-header", Severity.NOTE, "PyTorch's extension builder (hipify) translates this include", "")
PTX = Rule(
    "inline-ptx",
    Severity.PROBLEM,
    "inline PTX is NVIDIA's assembly: no AMD compiler takes it",
    "a HIP intrinsic or plain C++ under `#ifdef __HIP_PLATFORM_AMD__`",
)
BALLOT = Rule(
    "lane-mask-32",
    Severity.PROBLEM,
    "a wave has 64 lanes on CDNA: a 32-bit mask or ballot loses the upper half, in silence",
    "64-bit masks (`__ballot` returns unsigned long long), and warpSize instead of 32",
)

SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".inl")

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
_CONDITION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)")
_PLATFORM = re.compile(r"HIP|ROCM|AMD|__gfx")
# asm with a PTX mnemonic: dotted words of small letters, which no GCN mnemonic has
_ASM = re.compile(r"\basm\s*(volatile|__volatile__)?\s*\(")
_MNEMONIC = re.compile(r'"\s*(\{|\\n|\\t|\s)*(@!?%?p\s+)?\.?[a-z]+[a-z0-9]*(\.[a-z0-9:]+)+[\s\\%"]')
_MASK = re.compile(r"_sync\s*\(\s*(0xffffffff|-1u|FULL_MASK\b|~0u?)(?![0-9a-f])", re.IGNORECASE)
_NARROW = re.compile(r"\b(unsigned( int)?|uint32_t|int)\s+\w+\s*=\s*__(ballot|activemask)|\b__popc\s*\(\s*__ballot")


def of_native(text: str) -> Iterator[Place]:
    """Findings in a source file; what a preprocessor condition on HIP or ROCm encloses is left alone."""
    conditions: list[bool] = []
    lines = _without_comments(text).splitlines()
    for number, line in enumerate(lines, 1):
        if condition := _CONDITION.match(line):
            _step(conditions, condition[1], bool(_PLATFORM.search(condition[2])))
        elif any(conditions):
            continue
        elif include := _INCLUDE.match(line):
            if library := by_header(include[1]):
                rule = TRANSLATED if library.hipify else HEADER
                yield Place(rule, number, f"#include <{include[1]}>", instead=f"{library.cuda}: {library.rocm}")
        elif _ASM.search(line) and _MNEMONIC.search("".join(lines[number - 1 : number + 3])):
            yield Place(PTX, number, line.strip()[:80])
        elif _MASK.search(line) or _NARROW.search(line):
            yield Place(BALLOT, number, line.strip()[:80])


def defines_shuffles(text: str) -> bool:
    """Whether a source file gives CUDA's warp functions a meaning of its own, as headers for HIP do."""
    return re.search(r"^\s*#\s*define\s+__shfl\w*_sync\b", text, re.MULTILINE) is not None


def _step(conditions: list[bool], word: str, platform: bool) -> None:
    if word in ("if", "ifdef", "ifndef"):
        conditions.append(platform)
    elif conditions and word == "elif":
        conditions[-1] = conditions[-1] or platform
    elif conditions and word == "endif":
        conditions.pop()


def _without_comments(text: str) -> str:
    """The text with its comments blanked, line by line; strings are left, since PTX stands in them."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.DOTALL)
