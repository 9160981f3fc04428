"""The measurements of docs/performance.md, in segments that can be measured separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STOCK, COMPILE, OVERHEAD, LIGER = "stock", "compile", "reduce-overhead", "liger"
PREPARED, UNCAPTURED = "hf_rocm", "no-graphs"

_DECODERS = (STOCK, COMPILE, OVERHEAD, UNCAPTURED, PREPARED)
_ENCODERS = (STOCK, COMPILE, OVERHEAD, PREPARED)


@dataclass(frozen=True)
class Plan:
    """One segment. cases: (kind, batch, prompt, new). sides: the variants that are compared. run: `cases`, `kernels` or
    `starts` (cold starts). layers, dtype: override the layers and dtype of the shape. tp: the number of GPUs of a
    sharded model."""

    shape: str
    cases: tuple[tuple[str, int, int, int], ...] = ()
    sides: tuple[str, ...] = (STOCK, PREPARED)
    rounds: int = 5
    run: str = "cases"
    layers: int | None = None
    tp: int = 1
    dtype: str | None = None


def _decode(*sizes: tuple[int, int], new: int = 128) -> tuple[tuple[str, int, int, int], ...]:
    return tuple(("decode", batch, prompt, new) for batch, prompt in sizes)


SEGMENTS: dict[str, Plan] = {
    "decode-1": Plan("llama-8b", _decode((1, 1024)), _DECODERS),
    "decode-8": Plan("llama-8b", _decode((8, 1024)), (STOCK, COMPILE, OVERHEAD, PREPARED)),
    "decode-32": Plan("llama-8b", _decode((32, 1024)), (STOCK, COMPILE, OVERHEAD, PREPARED), rounds=3),
    "context-16k": Plan("llama-8b", _decode((1, 16384), (8, 16384)), rounds=3),
    "context-64k": Plan("llama-8b", _decode((1, 65536)), rounds=2),
    # half of the layers: the weights, keys, values and prompt activations of all layers would almost fill the memory
    "context-64k-8": Plan("llama-8b", _decode((8, 65536)), rounds=1, layers=16),
    "context-32k": Plan("llama-8b", _decode((8, 32768)), rounds=1),
    "prefill": Plan(
        "llama-8b",
        tuple(("prefill", batch, prompt, 0) for prompt in (1024, 8192) for batch in (1, 8)),
        (STOCK, LIGER, PREPARED),
    ),
    "start": Plan("llama-8b", _decode((1, 1024), new=32), (STOCK, COMPILE, PREPARED), run="starts"),
    "kernels": Plan("llama-8b", run="kernels"),
    "qwen3-8b": Plan("qwen3-8b", _decode((1, 1024)), (STOCK, UNCAPTURED, PREPARED), rounds=3),
    "gemma2-9b": Plan("gemma2-9b", _decode((1, 1024)), (STOCK, UNCAPTURED, PREPARED), rounds=3),
    "mistral-7b": Plan("mistral-7b", _decode((1, 1024)), (STOCK, UNCAPTURED, PREPARED), rounds=3),
    "qwen3-30b-a3b": Plan("qwen3-30b-a3b", _decode((1, 1024)), (STOCK, UNCAPTURED, PREPARED), rounds=3),
    "bert-base": Plan("bert-base", (("encode", 1, 128, 0), ("encode", 32, 128, 0)), _ENCODERS),
    "siglip": Plan("siglip", (("encode", 1, 0, 0), ("encode", 32, 0, 0)), _ENCODERS),
    "vit-b": Plan("vit-b", (("encode", 1, 0, 0), ("encode", 64, 0, 0)), _ENCODERS),
    **{
        f"tp-{ranks}": Plan(
            "llama-70b",
            (*_decode((1, 1024)), ("prefill", 1, 1024, 0)),
            (STOCK, UNCAPTURED, PREPARED),
            layers=16,
            tp=ranks,
        )
        for ranks in (2, 4)
    },
    # in fp32, two logits are unlikely to be equal within rounding errors, so all tokens should equal stock's
    "tp-2-fp32": Plan("llama-70b", _decode((1, 1024)), rounds=1, layers=8, tp=2, dtype="float32"),
}


def measure(name: str, plan: Plan, progress: Callable[[str], None], *, device: str | None, rounds: int | None) -> Any:
    """Measure a segment, and return its result."""
    import torch

    from hf_rocm.tools.bench.cases import Case
    from hf_rocm.tools.bench.cold_start import starts
    from hf_rocm.tools.bench.ops_cases import OPERATIONS, ROUTING
    from hf_rocm.tools.bench.ops_run import compare_ops
    from hf_rocm.tools.bench.run import Subject, bench
    from hf_rocm.tools.load import device_named

    dtype = None if plan.dtype is None else getattr(torch, plan.dtype)
    subject = Subject(None, plan.shape, device_named(device), dtype, plan.layers)
    cases = [Case(*case) for case in plan.cases]
    if plan.run == "starts":
        return starts(subject, cases[0], plan.sides, segment=name, progress=progress)
    if plan.run == "kernels":
        sizes: dict[str, Any] = {"rows": (1, 8, 32, 1024), "batches": (1, 8), "keys": (1024, 32768), "prompt": 1024}
        return compare_ops(subject, (*OPERATIONS, ROUTING), **sizes, segment=name, progress=progress)
    if plan.tp > 1:
        from hf_rocm.tools.bench.ranks import bench_ranks

        return bench_ranks(
            subject, cases, plan.sides, ranks=plan.tp, rounds=rounds or plan.rounds, segment=name, progress=progress
        )
    return bench(subject, cases, plan.sides, rounds=rounds or plan.rounds, segment=name, progress=progress)
