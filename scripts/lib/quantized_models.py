"""Measure generation with quantised weights and with bf16 in one run: time, prefill and memory of each kind of weights.

A kind is bf16, a value of `quantize=`, or a checkpoint format of `packed_checkpoints`. Several models are on the device
at the same time and are timed in turn, round by round. If there are more than two and their caches do not fit, they are
timed one after another, with bf16 at the beginning and at the end. A kind that fails is reported, and the others are
still measured, unless bf16 can't be loaded.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib import packed_checkpoints as checkpoints

BF16 = "bf16"
# Operations of these families run in the eager tier for the reference logits.
_FAMILIES = ("linear", "experts")
# The share of the device's memory that may be used.
_USABLE = 0.95


@dataclass(frozen=True)
class Run:
    """What is measured. kinds: the kinds in addition to bf16. together: how many of them are on the device at the same
    time, in addition to bf16."""

    shape: str
    kinds: Sequence[str]
    batches: Sequence[int]
    prompt: int
    new: int
    rounds: int
    together: int
    group: int
    layers: int | None
    device: torch.device


def measure(run: Run) -> list[str]:
    """Measure and print. Returns the failures, as text."""
    failures: list[str] = []
    baseline = _loaded(run, BF16, failures)
    if baseline is None:
        return failures
    for first in range(0, max(len(run.kinds), 1), run.together):
        models = {BF16: baseline}
        for kind in run.kinds[first : first + run.together]:
            side = _loaded(run, kind, failures)
            if side is not None:
                models[kind] = side
        for batch in run.batches:
            _measure_batch(run, batch, models, failures)
        del models
        _free(run.device)
    return failures


def _measure_batch(run: Run, batch: int, models: dict[str, Any], failures: list[str]) -> None:
    kinds = list(models)
    if len(kinds) < 3 or _fit(run, batch, models[BF16].model, len(kinds)):
        turns = [kinds]
    else:
        turns = [[kind] for kind in (*kinds, BF16)]
    order = "in turn, round by round" if len(turns) == 1 else "one after another"
    print(
        f"\nbatch {batch}, prompt {run.prompt}, {order}\n"
        f"  {'':15}{'ms per token':>14}{'× bf16':>8}{'replay alone':>14}{'× bf16':>8}{'prefill, ms':>13}{'× bf16':>8}",
        flush=True,
    )
    base: tuple[float, ...] = ()
    for turn in turns:
        for kind, times in _time(run, batch, {kind: models[kind] for kind in turn}, failures).items():
            base = base or (times if kind == BF16 else (math.nan,) * 3)
            cells = "".join(
                f"{value:{width}.3f}{value / other:8.2f}"
                for value, other, width in zip(times, base, (14, 14, 13), strict=True)
            )
            print(f"  {kind:15}{cells}", flush=True)


def _time(run: Run, batch: int, models: dict[str, Any], failures: list[str]) -> dict[str, tuple[float, ...]]:
    """Return the medians in ms for every kind: per token, replay alone, and prefill."""
    from hf_rocm.tools.bench import inputs
    from hf_rocm.tools.bench.cases import Case
    from hf_rocm.tools.bench.generating import generate
    from hf_rocm.tools.bench.measure import WARM_ROUNDS

    case = Case("decode", batch, run.prompt, run.new)
    ids = inputs.tokens(next(iter(models.values())).model, batch, run.prompt)
    timings: dict[str, list[Any]] = {kind: [] for kind in models}
    for number in range(WARM_ROUNDS + run.rounds):
        for kind in list(timings):
            try:
                timed = generate(models[kind], ids, case)
            except Exception as error:  # noqa: BLE001 - the other kinds are still measured
                _failed(kind, f"batch {batch}", error, failures)
                del timings[kind]
                models[kind].release()
                _free(run.device)
                continue
            if number >= WARM_ROUNDS:
                timings[kind].append(timed)
    result: dict[str, tuple[float, ...]] = {}
    for kind, times in timings.items():
        later, first = (statistics.median(getattr(timing, name) for timing in times) for name in ("later", "first"))
        replay = models[kind].replay_alone()
        result[kind] = 1000 * later, math.nan if replay is None else replay, 1000 * first
    for side in models.values():
        side.release()
    _free(run.device)
    return result


def _fit(run: Run, batch: int, model: Any, count: int) -> bool:
    """Whether the caches of this number of models fit into the device's memory at the same time."""
    if run.device.type != "cuda":
        return True
    config, item = model.config, 2
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * width * batch * (run.prompt + run.new) * item
    # The outputs of gate and up, and what is computed from them.
    prefill = 5 * batch * run.prompt * config.intermediate_size * item
    free, total = torch.cuda.mem_get_info(run.device)
    reserved = torch.cuda.memory_reserved(run.device) - torch.cuda.memory_allocated(run.device)
    return count * cache + prefill < free + reserved - (1 - _USABLE) * total


def _loaded(run: Run, kind: str, failures: list[str]) -> Any:
    """Load a model of this kind, and print its size and its error. Returns the side to time, or None if this failed."""
    from hf_rocm.tools.bench.variants import PREPARED, Side, silence

    began = time.perf_counter()
    try:
        before = _allocated(run.device)
        model, packed = _checkpoint(run, kind) if kind in checkpoints.FORMATS else _quantized(run, kind)
        silence(model)
        _free(run.device)
        if run.device.type == "cuda":
            nbytes = _allocated(run.device) - before - sum(parameter.nbytes for parameter in model.parameters())
        else:
            nbytes = sum(tensor.nbytes for tensor in model.buffers())
        size = f"{(nbytes + sum(parameter.nbytes for parameter in model.parameters())) / 1e9:6.2f} GB"
        if packed:
            size += f", packed {nbytes / 1e9:.3f} ({nbytes / packed - 1:+.1%} of {packed / 1e9:.3f})"
        seconds = time.perf_counter() - began
        print(f"{kind:13} {size}, {seconds:.0f} s, {_checked(model, run.device)}", flush=True)
    except Exception as error:  # noqa: BLE001 - the other kinds are still measured
        _failed(kind, "loading", error, failures)
        _free(run.device)
        return None
    return Side(PREPARED, model)


def _checkpoint(run: Run, kind: str) -> tuple[Any, int]:
    """Write a checkpoint and load it. Returns the model, and the bytes of its packed tensors."""
    import hf_rocm

    with tempfile.TemporaryDirectory() as folder:
        packed = checkpoints.write(Path(folder), kind, run.shape, group=run.group, layers=run.layers, device=run.device)
        _free(run.device)
        placement: dict[str, Any] = {} if run.device.type == "cpu" else {"device_map": {"": run.device}}
        return hf_rocm.from_pretrained(folder, force=True, **placement), packed


def _quantized(run: Run, kind: str) -> tuple[Any, int]:
    """Build a model with random weights, and quantise it. Returns the model, and the bytes of its encoded weights."""
    import hf_rocm
    from hf_rocm.tools.bench.shapes import build
    from hf_rocm.weights.encoding import QuantizedWeight
    from hf_rocm.weights.mxfp4_experts import Mxfp4Experts

    torch.manual_seed(0)
    model = build(run.shape, device=run.device, dtype=torch.bfloat16, layers=run.layers)
    hf_rocm.prepare(model, force=True, quantize=None if kind == BF16 else kind)
    weights = [module for module in model.modules() if isinstance(module, (QuantizedWeight, Mxfp4Experts))]
    return model, sum(tensor.nbytes for weight in weights for tensor in weight.buffers())


def _checked(model: Any, device: torch.device) -> str:
    """Compare one step with the eager tier. Returns the error of the logits and the kernels, as text."""
    from hf_rocm import ops, options

    ids = torch.arange(100, 108, device=device).view(8, 1)
    with ops.recording() as routes:
        logits = model(input_ids=ids, use_cache=False).logits.float()
    with options.override(tiers=dict.fromkeys(_FAMILIES, "eager")):
        expected = model(input_ids=ids, use_cache=False).logits.float()
    if not bool(logits.isfinite().all()):
        raise ValueError("the logits are not finite")
    error = ((logits - expected).norm() / expected.norm()).item()
    kernels = {
        f"{route.tier}/{route.name}" for route in routes if "linear" in route.operation or "mxfp4" in route.operation
    }
    return f"{error:.2%} off, {', '.join(sorted(kernels)) or 'no GEMMs'}"


def _failed(kind: str, phase: str, error: Exception, failures: list[str]) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    failures.append(f"{kind}, {phase}: {text[:300]}")
    print(textwrap.fill(f"{kind:13} failed, {phase}: {text[:300]}", 120, subsequent_indent=14 * " "), flush=True)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
