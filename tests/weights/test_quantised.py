"""Layers that other libraries quantised while loading stay unchanged and correct, and are listed with the reason."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers
from torch import nn

import hf_rocm
from hf_rocm.loading import prepare as preparing
from tests.weights.models import GROUPS, IDS, blocks, live


def needs(library):
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"not run: needs {library}")


def torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def eight_bits():
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def four_bits():
    return transformers.BitsAndBytesConfig(load_in_4bit=True)


LIBRARIES = [
    pytest.param(torchao, "q_proj has a weight that is of type Int8Tensor, not Parameter", marks=needs("torchao")),
    pytest.param(
        eight_bits,
        "q_proj is of type bitsandbytes.nn.modules.Linear8bitLt, not a plain nn.Linear",
        marks=needs("bitsandbytes"),
    ),
    pytest.param(
        four_bits,
        "q_proj is of type bitsandbytes.nn.modules.Linear4bit, not a plain nn.Linear",
        marks=needs("bitsandbytes"),
    ),
]


# The libraries emit warnings.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("config", "reason"), LIBRARIES)
def test_layers_of_quantisation_libraries_are_not_fused(checkpoint, config, reason):
    model = hf_rocm.from_pretrained(checkpoint, force=True, quantization_config=config()).eval()
    report = model.__dict__[preparing.REPORT]
    assert not report["fused"] and live(model) == blocks(model) == 0
    assert len(report["skipped"]) == GROUPS and report["skipped"]["model.layers.0.self_attn"] == reason
    # On a CPU, the 4-bit GEMM of bitsandbytes needs larger layers.
    if config is four_bits:
        return
    loader = transformers.LlamaForCausalLM
    stock = loader.from_pretrained(checkpoint, torch_dtype="auto", quantization_config=config()).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, use_cache=False).logits, stock(IDS, use_cache=False).logits)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items() if type(tensor) is torch.Tensor}
        hf_rocm.restore(model)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


class Packed(nn.Module):
    """A stand-in for the layers of compressed-tensors, GPTQ and AWQ: packed integers, and not an nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.data.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight.data / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.packed * self.scale)


@pytest.mark.parametrize("before", [False, True])
def test_layers_that_are_not_linear_layers_are_not_fused(stock, before):
    if before:
        hf_rocm.prepare(stock, force=True)
    for layer in stock.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, Packed(child))
    with torch.no_grad():
        expected = hf_rocm.restore(stock)(IDS, use_cache=False).logits
        hf_rocm.prepare(stock, force=True)
        torch.testing.assert_close(stock(IDS, use_cache=False).logits, expected)
    skipped = stock.__dict__[preparing.REPORT]["skipped"]
    assert len(skipped) == GROUPS and all("Packed, not a plain nn.Linear" in reason for reason in skipped.values())


def test_groups_with_some_quantised_layers_are_not_fused(stock):
    """`modules_to_not_convert` leaves some layers of a group unquantised. Groups are fused completely or not at all."""
    stock.model.layers[0].mlp.up_proj = Packed(stock.model.layers[0].mlp.up_proj)
    hf_rocm.prepare(stock, force=True)
    report = stock.__dict__[preparing.REPORT]
    assert list(report["skipped"]) == ["model.layers.0.mlp"] and live(stock) == GROUPS - 1
