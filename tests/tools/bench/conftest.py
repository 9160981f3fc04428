"""A tiny model, and example results of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_rocm.tools.bench import shapes
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import Spread
from hf_rocm.tools.bench.measure import Result, Timing
from hf_rocm.tools.bench.parity import Parity
from hf_rocm.tools.bench.rates import Rates
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.roofline import Floor

CPU = torch.device("cpu")
RATES = Rates(copy=1e10, matmul=1e11)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Part(torch.nn.Parameter):
    """A sharded parameter. This rank stores the first half."""

    def to_local(self):
        return self[: len(self) // 2]


@pytest.fixture
def model():
    return shapes.build("small", device=CPU, dtype=torch.float32, layers=1)


def timing(side: str, milliseconds: float, **rest) -> Timing:
    spread = Spread(milliseconds, 0.9 * milliseconds, 1.2 * milliseconds)
    facts = {"first": Spread(30.0, 29.0, 31.0), "warmup": 0.7, "peak": 16_080_000_000, "note": None, **rest}
    parity = Parity(1, 2, 1)
    return Timing(side, spread, facts.pop("first"), rounds=(milliseconds,), parity=parity, **facts)


def result(case: Case, floor: float = 4.0, **sides: float) -> Result:
    timings = tuple(
        timing(name.replace("_", "-") if name != "hf_rocm" else name, value) for name, value in sides.items()
    )
    return Result(case, Floor(floor, 15e9, 1e10, "memory"), timings, {"liger": "liger-kernel is not installed"})


def segment(name: str = "decode-1", *results: Result, **changes) -> Segment:
    facts = {
        "machine": {"device": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.17.0"},
        "commit": "0123456789ab",
        "model": {
            "name": "llama-8b",
            "class": "LlamaForCausalLM",
            "weights": "random",
            "dtype": "bfloat16",
            "matrix_bytes": 15e9,
        },
        "rates": Rates(4.25e12, 790e12),
        "rounds": 5,
        **changes,
    }
    chosen = results or (
        result(Case("decode", 1, 1024, 128), stock=16.0, compile=8.0, reduce_overhead=7.0, hf_rocm=5.0),
    )
    return Segment(name, **facts, results=chosen)
