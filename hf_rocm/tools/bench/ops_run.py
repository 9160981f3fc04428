"""One run of `hf-rocm bench ops`, as a segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_rocm.errors import OptionError
from hf_rocm.tools.bench import rates as machine_rates
from hf_rocm.tools.bench.known_shapes import shape
from hf_rocm.tools.bench.machine import commit, machine
from hf_rocm.tools.bench.measure import Progress
from hf_rocm.tools.bench.ops import compare_all
from hf_rocm.tools.bench.ops_cases import ROUTING, Sizes, cases
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.routing import routing
from hf_rocm.tools.bench.run import Subject


def compare_ops(
    subject: Subject,
    names: Sequence[str],
    *,
    rows: Sequence[int],
    batches: Sequence[int],
    keys: Sequence[int],
    prompt: int,
    segment: str,
    progress: Progress,
) -> Segment:
    """Compare these operations at the shapes of a named decoder. Raises `OptionError` for an encoder."""
    assert subject.shape is not None
    named = shape(subject.shape)
    if named.encoder:
        raise OptionError(f"{subject.shape} is an encoder", hint="select a decoder with --config")
    dtype = subject.dtype or (torch.bfloat16 if subject.device.type == "cuda" else torch.float32)
    progress("measuring copy bandwidth and matmul rate")
    rates = machine_rates.measure(subject.device, dtype)
    sizes = Sizes(rows, batches, keys, prompt, subject.device, dtype)
    chosen = [name for name in names if name != ROUTING]
    lines = list(compare_all(list(cases(chosen, named, sizes)), rates, subject.device, progress))
    if ROUTING in names:
        lines += routing()
    model = {
        "name": subject.shape,
        "class": named.model,
        "weights": "random",
        "dtype": str(dtype).removeprefix("torch."),
    }
    return Segment(
        segment, machine(subject.device), commit(), model, rates, 5, kernels=tuple(line._asdict() for line in lines)
    )
