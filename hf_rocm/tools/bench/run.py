"""One run of the benchmark: the model, its sides, the machine's rates, and the requested cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.loading.pretrained import class_for, from_pretrained
from hf_rocm.tools.bench import rates as machine_rates
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.known_shapes import SHAPES
from hf_rocm.tools.bench.machine import commit, machine
from hf_rocm.tools.bench.measure import Measurement, Progress, measure
from hf_rocm.tools.bench.parity import Reference
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.roofline import Weights
from hf_rocm.tools.bench.shapes import build
from hf_rocm.tools.bench.variants import Side, sides
from hf_rocm.tools.load import loading

_INPUTS = {"input_ids": "tokens", "pixel_values": "pixels"}


@dataclass(frozen=True)
class Subject:
    """The measured model: a checkpoint, or a named shape with random weights."""

    model: str | None
    shape: str | None
    device: torch.device
    dtype: torch.dtype | None = None
    layers: int | None = None

    @property
    def name(self) -> str:
        layers = f", {self.layers} layer{'s' * (self.layers != 1)}" if self.layers is not None else ""
        return f"{self.shape or self.model}{layers}"

    @property
    def encoder(self) -> bool:
        """Whether forward passes are timed, because the model generates no text."""
        if self.shape is not None:
            return SHAPES[self.shape].encoder
        # AutoModelForCausalLM has no such method.
        can_generate = getattr(self._class, "can_generate", None)
        return self._class.__name__ == "AutoModel" or (can_generate is not None and not can_generate())

    @property
    def inputs(self) -> str:
        """`tokens` or `pixels`. Raises `OptionError` for a model with other inputs."""
        if self.shape is not None:
            return SHAPES[self.shape].inputs
        name = getattr(self._class, "main_input_name", "input_ids")
        if name not in _INPUTS:
            raise OptionError(
                f"{self._class.__name__} can't be measured: its input is {name}",
                facts={"supported": ", ".join(_INPUTS)},
            )
        return _INPUTS[name]

    @cached_property
    def _class(self) -> Any:
        assert self.model is not None
        with loading(self.model):
            return class_for(self.model)

    def load(self) -> Any:
        """Load the stock model on its device, in eval mode: in `dtype`, by default bf16 on a GPU and fp32 on a CPU."""
        dtype = self.dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        if self.shape is not None:
            return build(self.shape, device=self.device, dtype=dtype, layers=self.layers)
        assert self.model is not None
        with loading(self.model):
            model = from_pretrained(self.model, force=False, dtype=dtype)
        if getattr(model.config, "is_encoder_decoder", False):
            raise OptionError(
                f"{type(model).__name__} has an encoder and a decoder", hint="pass a model that has only one of them"
            )
        return model.to(self.device).eval()


def bench(
    subject: Subject,
    cases: Sequence[Case],
    names: Sequence[str],
    *,
    rounds: int,
    segment: str,
    progress: Progress,
    parity: bool = True,
) -> Segment:
    """Measure every case on all sides, in interleaved rounds if the caches of all sides fit in memory.

    parity: whether to check the results first. Raises `Mismatch` if those of hf_rocm are wrong.
    """
    progress(f"{subject.name}: building the model")
    model = subject.load()
    reference = Reference(model) if parity else None
    available, missing = sides_of(model, subject, names)
    progress(f"{subject.name}: measuring the rates of copies and GEMMs")
    dtype = next(model.parameters()).dtype
    rates = machine_rates.measure(subject.device, dtype)
    run = Measurement(model, available, reference, rates, rounds, progress)
    # Recorded graphs must be kept until the next round.
    with options.override(graphs_memory="50%"):
        results = tuple(measure(run, case) for case in cases)
    return Segment(
        segment, machine(subject.device), commit(), describe(subject, model), rates, rounds, missing, results
    )


def sides_of(model: Any, subject: Subject, names: Sequence[str]) -> tuple[list[Side], dict[str, str]]:
    """Return the sides of a loaded model, and the reasons why others are not available here.

    Raises `OptionError` if none of them is available.
    """
    available, missing = sides(model, list(names), encoder=subject.encoder)
    if not available:
        raise OptionError("none of these sides is available here", facts=missing, hint="select others with --sides")
    return available, missing


def describe(subject: Subject, model: Any) -> dict[str, Any]:
    """Return the facts about the model that are reported with the numbers."""
    weights = Weights.of(model)
    return {
        "name": subject.name,
        "class": type(model).__name__,
        "weights": "random" if subject.shape is not None else "its own",
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "matrix_bytes": weights.item * (weights.dense + weights.routed),
    }
