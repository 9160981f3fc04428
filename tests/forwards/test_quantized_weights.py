"""Prompts and forwards of models with quantised weights are recorded like those of other models."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm.weights.encoding import QuantizedWeight
from tests.forwards.conftest import call, counted, equal, logits_of, reasons
from tests.forwards.families import make as make_encoder
from tests.generation.conftest import make, prompt
from tests.weights import stored_checkpoints

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
KINDS = ["fp8", "int8", "int4", "mxfp4"]
# The first call runs uncaptured, the second is recorded, and the others are compared. The first comparison is not
# counted.
CALLS = 5


def quantized_pair(stock, kind):
    """Return a model whose forwards are recorded, and one that runs the same kernels uncaptured."""
    stock = stock.to(torch.bfloat16)
    pair = []
    for graphs in (None, False):
        model = hf_rocm.prepare(copy.deepcopy(stock), force=True, quantize=kind, graphs=graphs)
        assert any(isinstance(module, QuantizedWeight) for module in model.modules())
        pair.append(model)
    return pair


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_recorded(kind, recorded_on_cpu):
    prepared, twin = quantized_pair(make("llama", **SIZES), kind)
    for seed in range(CALLS):
        inputs = prompt(length=80, seed=seed)
        assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))
    assert counted(prepared) == (1, CALLS - 3), reasons(prepared)


@pytest.mark.parametrize("case", stored_checkpoints.FEW, ids=str)
def test_prompts_of_quantised_checkpoints_are_recorded(case, recorded_on_cpu, tmp_path):
    stored_checkpoints.write(tmp_path, case)
    prepared, twin = (hf_rocm.from_pretrained(tmp_path, force=True, graphs=graphs) for graphs in (None, False))
    for seed in range(CALLS):
        ids = torch.randint(5, 40, (2, 17), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))
    assert counted(prepared) == (1, CALLS - 3), reasons(prepared)


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_of_encoders_are_recorded(kind, recorded_on_cpu, exact_lengths):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    prepared, twin = quantized_pair(make_encoder("bert", **sizes), kind)
    for seed in range(CALLS):
        ids = torch.randint(5, 40, (2, 9), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": ids}
        assert equal(call(prepared, inputs), call(twin, inputs))
    assert counted(prepared) == (1, CALLS - 3), reasons(prepared)
