"""The plan of `quantize`: the head, which is quantised only on request."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm import ops
from hf_rocm.weights import quantize as quantizing
from tests.weights import models


@pytest.mark.parametrize("kind", ["int8", "int4-g32"])
def test_the_head_is_quantised_on_request(kind):
    model = models.prepared()
    before = models.logits(model)
    hf_rocm.quantize(model, kind, force=True, head=True, exclude=["layers"])
    assert [path for path, _ in quantizing.layers(model)] == ["lm_head"]
    with torch.no_grad(), ops.recording() as routes:
        output = model(models.IDS, use_cache=False).logits
    assert [route.shapes[1][0] for route in routes if route.operation == "quantized_linear"] == [96]
    assert 0 < (output - before).norm() < (0.02 if kind == "int8" else 0.15) * before.norm()
    hf_rocm.dequantize(model)
    assert isinstance(model.lm_head, nn.Linear)


def test_a_tied_head_is_not_quantised():
    model = models.build(tie_word_embeddings=True)
    hf_rocm.quantize(model, "int8", force=True, head=True)
    assert "embed_tokens" in model.__dict__[quantizing.REPORT]["left"]["lm_head"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
