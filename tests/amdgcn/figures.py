"""Performance figures that are computed from the machine code, for GPUs on which nobody has run it.

    python -m tests.amdgcn.figures [ARCH ...]

For every kernel of the operations in `cases`, compiled as hf_rocm launches it, the table lists the registers, LDS,
waves per SIMD, the ratio of requested to needed bytes, and the bytes in flight per compute unit compared with Little's
law (bandwidth x latency / units). The latency is an assumption.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """A GPU's memory. bandwidth: bytes per second; latency: seconds, assumed; units: compute units as HIP counts them.
    For an MI250X, the numbers are those of one die, which HIP presents as one GPU.

    simds, lds: per unit (a pair of compute units on RDNA). waves: the maximum per SIMD.
    """

    bandwidth: float
    latency: float
    units: int
    simds: int
    lds: int
    waves: int

    def needed(self) -> float:
        """The bytes that must be in flight per unit."""
        return self.bandwidth * self.latency / self.units


# Latencies in seconds; assumed, not measured.
HBM, GDDR, LPDDR = 800e-9, 500e-9, 500e-9
MEMORIES: Mapping[str, Memory] = {
    "gfx90a": Memory(1.6e12, HBM, 110, 4, 65536, 8),  # MI250X, one die
    "gfx942": Memory(5.3e12, HBM, 304, 4, 65536, 8),  # MI300X
    "gfx950": Memory(8.0e12, HBM, 256, 4, 163840, 8),  # MI355X
    "gfx1100": Memory(0.96e12, GDDR, 48, 4, 131072, 16),  # RX 7900 XTX
    # The memory of gfx1150 is 128-bit LPDDR5X-7500.
    "gfx1150": Memory(0.12e12, LPDDR, 8, 4, 131072, 16),  # Radeon 890M
    "gfx1151": Memory(0.256e12, LPDDR, 20, 4, 131072, 16),  # Radeon 8060S
    "gfx1200": Memory(0.32e12, GDDR, 16, 4, 131072, 16),  # RX 9060 XT
    "gfx1201": Memory(0.64e12, GDDR, 32, 4, 131072, 16),  # RX 9070 XT
}

_BYTES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
    "ushort": 2, "u16": 2, "short": 2, "ubyte": 1, "u8": 1, "sbyte": 1, "i8": 1, "sshort": 2, "i16": 2,
}  # fmt: skip
_ACCESS = re.compile(r"(?:global|buffer)_(load|store)_(\w+)")
_WAIT = re.compile(r"s_waitcnt.*\bvmcnt\((\d+)\)|s_wait_loadcnt(?:_dscnt)? (0x[0-9a-f]+|\d+)")


@dataclass(frozen=True)
class Case:
    """An operation with a model's sizes, or with a smaller weight. larger: the ratio of the model's number of programs
    to that of this operation."""

    name: str
    run: Callable[[], Any]
    larger: float = 1.0


@dataclass
class Figures:
    """One kernel on one architecture."""

    case: str
    kernel: str
    arch: str
    warps: int
    vgprs: int
    lds: int
    waves_by_registers: int
    waves_by_lds: int
    programs: int
    requested: int
    needed: int
    in_flight_per_wave: int
    in_flight_per_unit: float
    in_flight_needed: float


def in_flight(instructions: list[str], arch: str) -> int:
    """The maximum number of bytes that one wave with all lanes active has requested from global memory and not yet
    waited for.

    The instructions are read in the order of the text. A wait for all but n operations leaves the last n in flight.
    """
    lanes = 64 if arch.startswith("gfx9") else 32
    in_flight_bytes: deque[int] = deque()
    maximum = 0
    for text in instructions:
        if match := _ACCESS.match(text):
            if match[1] == "load":
                in_flight_bytes.append(lanes * _BYTES[match[2].removeprefix("d16_").removeprefix("hi_").split("_")[0]])
            elif lanes == 64:
                # On CDNA, stores use the same counter.
                in_flight_bytes.append(0)
            maximum = max(maximum, sum(in_flight_bytes))
        elif match := _WAIT.match(text):
            left = int(match[1] or match[2], 0)
            if not match[1] and "dscnt" in text:
                left >>= 8
            while len(in_flight_bytes) > left:
                in_flight_bytes.popleft()
    return maximum


def measure(case: Case, arch: str) -> list[Figures]:
    """Run one case on the GPU that is emulated in this process. Returns the figures of every launch."""
    from tests.amdgcn import driver

    memory, out = MEMORIES[arch], list[Figures]()

    def watch(code: Any, report: Any, settings: dict[str, Any]) -> None:
        x, y, z = settings["grid"]
        warps, lds = settings["waves"], settings["lds"]
        vgprs = _number_in(code.text, r"\.vgpr_count:\s*(\d+)")
        by_registers = _number_in(code.text, r"; Occupancy: (\d+)")
        groups = memory.lds // lds if lds else 1 << 30
        by_lds = min(memory.waves, groups * warps // memory.simds)
        programs = round(x * y * z * case.larger)
        wave = in_flight(code.instructions(), arch)
        resident = min(by_registers, by_lds) * memory.simds
        # bytes that several programs request, such as x of a GEMM, are read from memory once
        needed_share = report.bytes_needed / max(1, report.bytes_requested)
        unit = wave * needed_share * min(resident, warps * programs / memory.units)
        figures = (warps, vgprs, lds, by_registers, by_lds, programs, report.bytes_requested, report.bytes_needed)
        out.append(Figures(case.name, code.name, arch, *figures, wave, unit, memory.needed()))

    driver.WATCHERS.append(watch)
    try:
        case.run()
    finally:
        driver.WATCHERS.remove(watch)
    return out


def cases() -> list[Case]:
    """Operations with the sizes of Llama-3.1-8B during decoding.

    32 query heads and 8 key/value heads of size 128, hidden size 4096, intermediate size 14336.
    """
    from hf_rocm import ops, options

    def served(operation: Callable[..., Any], *arguments: Any, **keywords: Any) -> Callable[[], Any]:
        def run() -> Any:
            with options.override(tier="triton", probe=False):
                return operation(*arguments, **keywords)

        return run

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()

    def cache(length: int) -> tuple[Any, ...]:
        query, lengths = random(1, 1, 32, 128).transpose(1, 2), torch.tensor([length], dtype=torch.int32)
        return query, random(1, 8, length, 128), random(1, 8, length, 128), lengths

    def plain(rows: int, n: int, k: int, actual: int) -> Case:
        name = f"linear, {rows} x 4096 -> {actual}"
        return Case(name, served(ops.linear, random(rows, k), random(n, k)), actual / n)

    def gated(rows: int, n: int, actual: int) -> Case:
        # For several rows, a separate kernel computes the norm.
        norm = ops.Norm(random(4096), 1e-5, False) if rows == 1 else None
        run = served(ops.fused_linear, random(rows, 4096), random(n, 4096), norm=norm, activation="silu")
        name = "gate and up" if norm is None else "norm, gate and up"
        return Case(f"{name}, {rows} x 4096 -> {actual}", run, actual / n)

    return [
        Case("rms_norm, 1 x 4096", served(ops.rms_norm, random(1, 4096), random(4096), eps=1e-6)),
        Case("act_and_mul, 1 x 14336", served(ops.act_and_mul, random(1, 28672), activation="silu")),
        Case("decode_attention, 1024 keys", served(ops.decode_attention, *cache(1024), scale=0.1)),
        plain(1, 64, 4096, 4096),
        # More columns than NARROW, because the tile would otherwise differ.
        plain(1, 4160, 1024, 6144),
        plain(4, 64, 4096, 4096),
        plain(4, 4160, 1024, 6144),
        gated(1, 64, 28672),
        gated(4, 128, 28672),
    ]


def _number_in(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return int(match[1])


def figures_of(arch: str) -> list[Figures]:
    """Run all cases on one architecture in this process."""
    from tests.amdgcn.device import GPUS
    from tests.amdgcn.driver import presented

    with presented(GPUS[arch]):
        return [figures for case in cases() for figures in measure(case, arch)]


def table(rows: list[Figures]) -> str:
    """Format the figures as a Markdown table."""
    header = ("Call", "Kernel", "GPU", "Warps", "VGPRs", "LDS", "Waves per SIMD: registers, LDS", "Programs")
    header += ("Requested / needed", "In flight per unit", "Little's law")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in rows:
        ratio = f"{row.requested / row.needed:.2f}" if row.needed else "–"
        waves = f"{row.waves_by_registers}, {row.waves_by_lds}"
        flight = f"{row.in_flight_per_unit / 1000:.1f} kB | {row.in_flight_needed / 1000:.1f} kB"
        cells = (row.case, row.kernel, row.arch, row.warps, row.vgprs, row.lds, waves, row.programs)
        lines.append(f"| {' | '.join(map(str, (*cells, ratio, flight)))} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        print(json.dumps([asdict(figures) for figures in figures_of(arguments[1])]))
        return 0
    rows = list[Figures]()
    # One process per architecture, because Triton caches compiled kernels.
    for arch in arguments or list(MEMORIES):
        result = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--one", arch], stdout=subprocess.PIPE, check=True
        )
        rows += [Figures(**figures) for figures in json.loads(result.stdout)]
    rows.sort(key=lambda figures: (figures.case, figures.kernel))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
