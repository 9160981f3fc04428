"""What AMD's data sheets say of four GPUs, and the floor that follows from it: arithmetic, not measurement."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """bandwidth: bytes a second. capacity: bytes. bf16: dense operations a second. All at their peak."""

    name: str
    arch: str
    bandwidth: float
    capacity: float
    bf16: float


GPUS = (
    Gpu("MI300X", "gfx942", 5.3e12, 192e9, 1307.4e12),
    Gpu("MI325X", "gfx942", 6.0e12, 256e9, 1307.4e12),
    Gpu("MI355X", "gfx950", 8.0e12, 288e9, 2516.6e12),
    Gpu("RX 7900 XTX", "gfx1100", 0.96e12, 24e9, 122.8e12),
)

# Bytes of matrices that one decode step of one row reads, of keys and values for one token, and of all weights; and
# operations of one token in prefill without attention and head. bf16, from the shapes of hf_rocm.bench.
MODELS = {
    "llama-8b": (15.01e9, 131072, 16.06e9, 13.96e9),
    "llama-70b": (139.01e9, 327680, 141.11e9, 136.90e9),
}


def table() -> str:
    """Markdown: the least time of a decode step and of a prefill that these peaks allow."""
    lines = [
        "| | peak bandwidth | memory | peak bf16 | Llama-8B: a token, batch 1 | with 16k of context | prefill of 1024 "
        "| Llama-70B: a token |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for gpu in GPUS:
        small, large = MODELS["llama-8b"], MODELS["llama-70b"]
        token = small[0] / gpu.bandwidth
        long = (small[0] + 16384 * small[1]) / gpu.bandwidth
        prefill = 1024 * small[3] / gpu.bf16
        fits = large[2] < gpu.capacity
        cells = [
            f"{gpu.name} ({gpu.arch})",
            f"{gpu.bandwidth / 1e12:.2f} TB/s",
            f"{gpu.capacity / 1e9:.0f} GB",
            f"{gpu.bf16 / 1e12:.0f} TFLOP/s",
            f"{1000 * token:.2f} ms ({1 / token:.0f} tokens/s)",
            f"{1000 * long:.2f} ms",
            f"{1000 * prefill:.1f} ms",
            f"{1000 * large[0] / gpu.bandwidth:.1f} ms" if fits else "does not fit",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
