"""C, C++ and CUDA sources: includes of NVIDIA's libraries, and code that hipify can't translate to HIP."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity, excerpt
from hf_rocm.tools.porting.libraries import by_header, by_object

HEADER = Rule("cuda-header", Severity.WARNING, "hipify does not translate this library", "")
TRANSLATED = Rule(
    "hipified-header",
    Severity.NOTE,
    "PyTorch's extension builder translates it: HIP has this library, or an equivalent one",
    "no change needed: hipify translates this include",
)
PTX = Rule(
    "inline-ptx",
    Severity.PROBLEM,
    "inline PTX is NVIDIA's assembly: no AMD compiler accepts it",
    "a HIP intrinsic or plain C++ under `#ifdef __HIP_PLATFORM_AMD__`",
)
BALLOT = Rule(
    "lane-mask-32",
    Severity.PROBLEM,
    "a wave has 64 lanes on CDNA: a 32-bit mask or ballot silently drops the upper half",
    "64-bit masks (`__ballot` returns unsigned long long), and warpSize instead of 32",
)

LANES = Rule(
    "warp-size-32",
    Severity.WARNING,
    "lanes are counted in groups of 32, but a wave has 64 lanes on CDNA: half of them are left out, or lane "
    "numbers are wrong",
    "warpSize on the device, and warp_size of torch.cuda.get_device_properties(0) on the host",
)
MACRO = Rule(
    "cuda-arch-macro",
    Severity.WARNING,
    "HIP's compiler does not define this macro: it silently compiles the code for older GPUs, or none",
    "add a condition on __HIP_DEVICE_COMPILE__, __gfx942__ or a similar macro",
)
OBJECT = Rule(
    "cuda-shared-object",
    Severity.PROBLEM,
    "the library is loaded by its file name, and no machine with AMD GPUs has that file",
    "",
)
FP8 = Rule(
    "fp8-type-native",
    Severity.WARNING,
    "HIP has its own FP8 types: FNUZ on gfx942 with another exponent bias, OCP on gfx950 and gfx12",
    "__hip_fp8_e4m3_fnuz or __hip_fp8_e4m3, depending on the target",
)

SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".inl", ".ipp", ".tpp")

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
_CONDITION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)")
_PLATFORM = re.compile(r"HIP|ROCM|AMD|__gfx")
# `asm`, and a string that begins with a PTX mnemonic: lower-case words joined by dots. GCN mnemonics contain no dots.
_ASM = re.compile(r"\basm\s*(?:(?:volatile|__volatile__)\s*)?\(")
_MNEMONIC = re.compile(r'"(?:\{|\\n|\\t|\s)*(?:@!?%?p\s+)?\.?[a-z][a-z0-9]*(?:\.[a-z0-9:]+)+[\s\\%"]')
# Words that occur only in CUDA and HIP code. Without them, 32 lanes may be correct, as in SYCL, Metal or CPU code.
_CUDA = re.compile(
    r"\b(?:threadIdx|__global__|__device__|__host__|__shfl\w*|cuda\w*)\b|(?<!\w)k?warp_?size", re.IGNORECASE
)
_SHUFFLE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+__shfl\w*_sync\b", re.MULTILINE)
# Strings, character literals and comments. Unclosed strings and comments match too, so that no text is scanned twice.
_COMMENT = re.compile(r""""(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?(?:\*/|\Z)""", re.DOTALL)
_MASK = re.compile(r"_sync\s*\(\s*(0xffffffff|-1u|FULL_MASK\b|~0u?)(?![0-9a-f])", re.IGNORECASE)
# A thread index modulo or divided by 32, such as `threadIdx.x & 31`, `tid % 32` or `threadIdx.x >> 5`. Also a warp size
# of 32.
_LANES = re.compile(
    r"\b(?:threadIdx\.[xyz]|t(?:hread)?_?id_?x?|tx)\s*(?:&\s*(?:31|0x1[fF])|%\s*32|/\s*32|>>\s*5)[uU]?\b"
    r"|#\s*define\s+\w*WARP_?SIZE\w*\s+\(?32\b"
    r"|\b(?:const|constexpr)\b[^;=(]*\b(?:k|n|num_?)?(?:warp_?size|threads_?per_?warp|lanes_?per_?warp)\w*\s*(?:=|\{)\s*32\b",
    re.IGNORECASE,
)
_ARCH = re.compile(
    r"__CUDA_ARCH(?:_LIST|_FEAT\w+|_SPECIFIC)?__|\bCUDART_VERSION\b|^(?!.*__CUDACC__).*__CUDACC_VER_MAJOR__"
)
_FP8 = re.compile(r"\b__nv_fp8(?:x[24])?_e[45]m[32]\b")
_LOADS = re.compile(r"\b(?:dlopen|LoadLibrary\w*)\s*\(\s*\"([^\"]+)\"")
_NARROW = re.compile(r"\b(unsigned( int)?|uint32_t|int)\s+\w+\s*=\s*__(ballot|activemask)|\b__popc\s*\(\s*__ballot")


def of_native(text: str) -> Iterator[Place]:
    """Yield findings in a source file, except inside preprocessor conditions on HIP or ROCm."""
    conditions: list[bool] = []
    # The number of enclosing conditions on the platform.
    platform = 0
    text = _without_comments(text)
    lines, cuda = text.splitlines(), _CUDA.search(text) is not None and "sycl::" not in text
    for number, line in enumerate(lines, 1):
        if condition := _CONDITION.match(line):
            if not platform and (macro := _ARCH.search(condition[2])) and not _PLATFORM.search(condition[2]):
                yield Place(MACRO, number, excerpt(line, *(condition.start(2) + edge for edge in macro.span())))
            platform += _step(conditions, condition[1], bool(_PLATFORM.search(condition[2])))
        elif not platform:
            yield from _of_line(line, number, cuda=cuda)
            if (asm := _ASM.search(line)) and _MNEMONIC.search("".join(lines[number - 1 : number + 3])):
                mnemonic = _MNEMONIC.search(line, asm.end())
                yield Place(PTX, number, excerpt(line, asm.start(), (mnemonic or asm).end()))


def _of_line(line: str, number: int, *, cuda: bool) -> Iterator[Place]:
    if include := _INCLUDE.match(line):
        if library := by_header(include[1]):
            rule = TRANSLATED if library.hipify else HEADER
            counterpart = f"{library.cuda}: {library.rocm}"
            if library.hipify:
                counterpart = "; ".join(filter(None, (TRANSLATED.instead, library.note)))
            yield Place(rule, number, f"#include <{include[1]}>", instead=counterpart)
        return
    for rule, pattern in ((BALLOT, _MASK), (BALLOT, _NARROW), (LANES, _LANES), (FP8, _FP8)):
        match = pattern.search(line) if cuda or rule is not LANES else None
        if match and not (pattern is _NARROW and _MASK.search(line)):
            yield Place(rule, number, excerpt(line, *match.span()))
    if (loads := _LOADS.search(line)) and (instead := by_object(loads[1])):
        yield Place(OBJECT, number, loads[0], instead=instead)


def defines_shuffles(text: str) -> bool:
    """Return whether a source file defines macros for CUDA's warp shuffles, as compatibility headers for HIP do."""
    return _SHUFFLE.search(text) is not None


def _step(conditions: list[bool], word: str, platform: bool) -> int:
    """Enter, change or leave a condition. Returns the change in the number of conditions on the platform."""
    if word in ("if", "ifdef", "ifndef"):
        conditions.append(platform)
        return int(platform)
    if conditions and word == "elif":
        before, conditions[-1] = conditions[-1], conditions[-1] or platform
        return int(conditions[-1]) - int(before)
    if conditions and word == "endif":
        return -int(conditions.pop())
    return 0


def _without_comments(text: str) -> str:
    """Return the text with comments replaced by spaces. Strings are kept, since they may contain PTX."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0][0] in "\"'" else re.sub(r"[^\n]", " ", match[0])

    return _COMMENT.sub(blank, text)
