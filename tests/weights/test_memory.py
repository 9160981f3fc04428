"""Memory that torch's CPU allocator allocates and frees during an action.

torch.profiler reports every allocation and release with its size. Their sum is the change, and the highest running sum
is the peak. Both include blocks that Python can't reach (tensors created through DLPack keep them alive) and temporary
copies. The size of a released block is reported only if its allocation was profiled, so models are built under the
profiler, and a marker separates building from the measured action. The allocator does not count mapped checkpoints, so
these models are built in memory. As an independent measurement, the union of all storages is also checked.
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hf_rocm
from hf_rocm.layers.grouped_linear import live as fused
from tests.weights import models
from tests.weights.models import live

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 256}


class Traffic(NamedTuple):
    """Memory traffic in bytes. change: after minus before. peak: maximum minus before. events: number of events."""

    change: int
    peak: int
    events: int


def count(action: Callable[[Any], object], folder: Path, *, prepared: bool) -> tuple[Any, Traffic]:
    """Build a model, prepare it if `prepared`, and measure an action on it. Returns the model and the traffic."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = models.build(**SHAPE)
        if prepared:
            hf_rocm.prepare(model, force=True)
        gc.collect()
        with torch.profiler.record_function("measured from here"):
            kept = action(model)
            gc.collect()
    profile.export_chrome_trace(str(folder / "trace.json"))
    del kept
    recorded = json.loads((folder / "trace.json").read_text())["traceEvents"]
    start = next(event["ts"] for event in recorded if event.get("name") == "measured from here")
    events = [event for event in recorded if event.get("name") == "[memory]" and event["ts"] >= start]
    running = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        running += event["args"]["Bytes"]
        peak = max(peak, running)
    return model, Traffic(running, peak, len(events))


def stored_bytes(model) -> int:
    """Bytes of the union of all storages of the model's tensors and blocks."""
    spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in model.state_dict().values()]
    for module in model.modules():
        with torch.no_grad():
            block = fused(module)
        if block is not None:
            spans.append((block.weight.data_ptr(), block.weight.nbytes))
    total = end = 0
    for start, size in sorted(spans):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def size(model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def one_layer(model) -> int:
    layer = model.model.layers[0]
    names = ("q_proj", "k_proj", "v_proj")
    return sum(getattr(layer.self_attn, name).weight.nbytes for name in names) + 2 * layer.mlp.up_proj.weight.nbytes


def test_a_copy_is_counted(tmp_path):
    model, traffic = count(copy.deepcopy, tmp_path, prepared=False)
    assert traffic.events > 10
    assert size(model) <= traffic.change <= traffic.peak <= size(model) * 1.05


def test_preparing_adds_no_memory_and_peaks_at_one_layer(tmp_path):
    model, traffic = count(lambda model: hf_rocm.prepare(model, force=True), tmp_path, prepared=False)
    assert live(model) == 6
    assert abs(traffic.change) <= size(model) * 0.01
    assert 0 < traffic.peak <= one_layer(model)
    assert abs(stored_bytes(model) - size(model)) <= size(model) * 0.01


def test_restoring_adds_no_memory_and_peaks_at_one_layer(tmp_path):
    model, traffic = count(hf_rocm.restore, tmp_path, prepared=True)
    assert live(model) == 0
    assert abs(traffic.change) <= size(model) * 0.01
    assert 0 < traffic.peak <= one_layer(model)


def test_saving_peaks_at_most_one_layer_higher_than_stock(tmp_path):
    model, plain = count(lambda model: model.save_pretrained(tmp_path / "stock"), tmp_path, prepared=False)
    _, prepared = count(lambda model: model.save_pretrained(tmp_path / "prepared"), tmp_path, prepared=True)
    assert prepared.peak <= plain.peak + one_layer(model)
    assert abs(prepared.change - plain.change) <= size(model) * 0.01


def test_converting_frees_the_old_blocks(tmp_path):
    model, traffic = count(lambda model: model.bfloat16(), tmp_path, prepared=True)
    assert live(model) == 6
    # Half of the memory is freed.
    assert abs(traffic.change + size(model)) <= size(model) * 0.02
    # an old block is freed before the new one is allocated, so the peak includes only the parts in the new dtype
    assert traffic.peak <= one_layer(model) / 4


def test_a_stale_block_is_freed_by_the_next_call(tmp_path):
    def assign(model):
        # there are twice as many weights until the old ones are freed
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
        models.logits(model)

    model, traffic = count(assign, tmp_path, prepared=True)
    assert live(model) == 0
    assert abs(traffic.change) <= size(model) * 0.01 < traffic.peak


def test_a_copy_needs_the_memory_of_a_stock_copy(tmp_path):
    def duplicate(model):
        twin = copy.deepcopy(model)
        models.logits(twin)
        return twin

    model, traffic = count(duplicate, tmp_path, prepared=True)
    assert live(model) == 6
    assert abs(traffic.change - size(model)) <= size(model) * 0.01
