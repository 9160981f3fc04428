"""Layers on two simulated devices: fake tensors have a device and raise if devices are mixed.

So a mask, a position or a cache entry on the wrong device is an error, as on two GPUs. Fake weights are not plain
parameters, so layers are not fused and norms stay stock; tests/gpu/test_device_maps.py tests the other cases.
"""

from __future__ import annotations

import accelerate
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicLayer

import hf_rocm
from hf_rocm import ops
from tests.generation.conftest import make

# accelerate reads the address of every weight
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")

# Fake tensors treat these as two devices.
FIRST, SECOND = "cpu:1", "cpu:2"
MAP = {
    "model.embed_tokens": FIRST,
    "model.rotary_emb": FIRST,
    "model.layers.0": FIRST,
    "model.layers.1": SECOND,
    "model.norm": SECOND,
    "lm_head": SECOND,
}


@pytest.fixture(autouse=True)
def empty_cache_layers(monkeypatch):
    """transformers initialises a cache layer with `torch.tensor([], device=…)`, which loses a fake device."""

    def begin(self, keys, *rest):
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys = self.values = keys[:, :, :0]

    monkeypatch.setattr(DynamicLayer, "lazy_initialization", begin)


def spread(model):
    for path, module in model.named_modules():
        device = next((MAP[part] for part in MAP if f"{path}.".startswith(f"{part}.")), FIRST)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(device))
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(device)
    return accelerate.dispatch_model(model, MAP, main_device=FIRST)


def prompt_and_step(model):
    """Return (devices of both calls' logits, devices and length of the cache by layer, the operations that ran)."""
    ids = torch.ones(2, 7, dtype=torch.int64, device=FIRST)
    with torch.no_grad(), ops.recording() as routes:
        prompt = model(ids, attention_mask=torch.zeros(2, 1, 7, 7, device=FIRST), use_cache=True)
        cache = prompt.past_key_values
        step = model(
            ids[:, :1], attention_mask=torch.zeros(2, 1, 1, 8, device=FIRST), past_key_values=cache, use_cache=True
        )
    logits = [str(output.logits.device) for output in (prompt, step)]
    pieces = [(str(layer.keys.device), str(layer.values.device), layer.keys.shape[2]) for layer in cache.layers]
    return logits, pieces, [route.operation for route in routes]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_on_two_devices_run_as_in_stock(kind, when):
    with FakeTensorMode(allow_non_fake_inputs=True):
        stock, prepared = make(kind), make(kind)
        spread(stock)
        if when == "before":
            hf_rocm.prepare(prepared, force=True)
        spread(prepared)
        if when == "after":
            hf_rocm.prepare(prepared, force=True)
        expected = prompt_and_step(stock)
        actual = prompt_and_step(prepared)
    assert expected[:2] == ([FIRST] * 2, [(FIRST, FIRST, 8), (SECOND, SECOND, 8)])
    assert actual[:2] == expected[:2]
    assert expected[2] == [] and actual[2].count("attention") == actual[2].count("rope") == 4


def test_mixing_fake_devices_raises():
    with FakeTensorMode(), pytest.raises(Exception, match="found at least two devices"):
        torch.ones(3, 3, device=FIRST) @ torch.ones(3, 3, device=SECOND)
