"""Peak rates from AMD's data sheets, and lower bounds on times that are computed from these rates, not measured."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """Peak rates. bandwidth: bytes per second. capacity: bytes. bf16: dense operations per second.

    computed: whether bf16 is computed from the number of compute units, the operations per unit and clock cycle (512 on
    RDNA 3 and 3.5, 1024 on RDNA 4) and the maximum clock frequency.
    """

    name: str
    arch: str
    bandwidth: float
    capacity: float
    bf16: float
    computed: bool = False


GPUS = (
    Gpu("MI300X", "gfx942", 5.3e12, 192e9, 1307.4e12),
    Gpu("MI325X", "gfx942", 6.0e12, 256e9, 1307.4e12),
    Gpu("MI355X", "gfx950", 8.0e12, 288e9, 2516.6e12),
    Gpu("RX 7900 XTX", "gfx1100", 0.96e12, 24e9, 122.8e12),
    Gpu("RX 9060 XT", "gfx1200", 0.32e12, 16e9, 32 * 1024 * 3.13e9, computed=True),
    Gpu("Ryzen AI Max+ 395", "gfx1151", 0.256e12, 128e9, 40 * 512 * 2.9e9, computed=True),
    Gpu("Ryzen AI 9 HX 370", "gfx1150", 0.12e12, 96e9, 16 * 512 * 2.9e9, computed=True),
)

# Model → (bytes of the matrices that a decode step reads for one row, bytes of the keys and values of one token, bytes
# of all weights, operations per token in prefill without attention and head), in bf16, for the shapes of
# hf_rocm.tools.bench.
MODELS = {
    "llama-8b": (15.01e9, 131072, 16.06e9, 13.96e9),
    "llama-70b": (139.01e9, 327680, 141.11e9, 136.90e9),
}


def table() -> str:
    """Markdown: the minimum times of a decode step and of a prefill at these peak rates."""
    lines = [
        "| | peak bandwidth | memory | peak bf16 | Llama-8B: per token, batch 1 | with 16k of context "
        "| prefill of 1024 | Llama-70B: per token |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for gpu in GPUS:
        small, large = MODELS["llama-8b"], MODELS["llama-70b"]
        token = small[0] / gpu.bandwidth
        long = (small[0] + 16384 * small[1]) / gpu.bandwidth
        prefill = 1024 * small[3] / gpu.bf16
        fits, small_fits = large[2] < gpu.capacity, small[2] < gpu.capacity
        cells = [
            f"{gpu.name} ({gpu.arch})",
            f"{gpu.bandwidth / 1e12:.2f} TB/s",
            f"{gpu.capacity / 1e9:.0f} GB",
            f"{gpu.bf16 / 1e12:.0f} TFLOP/s{' (computed)' if gpu.computed else ''}",
            f"{1000 * token:.2f} ms ({1 / token:.0f} tokens/s)" if small_fits else "does not fit",
            f"{1000 * long:.2f} ms" if small_fits else "does not fit",
            f"{1000 * prefill:.1f} ms" if small_fits else "does not fit",
            f"{1000 * large[0] / gpu.bandwidth:.1f} ms" if fits else "does not fit",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
