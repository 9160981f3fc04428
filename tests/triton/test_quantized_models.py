"""Quantised layers on few rows: the Triton kernels include the norm, the gate and the residual sum."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import hf_rocm
from hf_rocm import ops, options
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models
from tests.weights.models import IDS, LAYERS


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_step_has_four_gemms_per_layer(kind):
    model = hf_rocm.prepare(models.build().bfloat16(), force=True)
    hf_rocm.quantize(model, kind, force=True)
    ids = IDS[:1, :3]
    with torch.no_grad(), ops.recording() as routes:
        actual = model(ids, use_cache=False).logits
    counted = Counter((route.operation, route.tier) for route in routes)
    assert counted["quantized_linear", "triton"] == 4 * LAYERS
    # Only the model's final norm runs separately.
    assert counted["rms_norm", "triton"] == 1 and counted["act_and_mul", "triton"] == 0
    hf_rocm.dequantize(model)
    hf_rocm.restore(model)
    with torch.no_grad(), options.override(tier="eager"):
        eager = model(ids, use_cache=False).logits
        exact = model.double()(ids, use_cache=False).logits
    assert_as_good_as_eager(actual, eager, exact)


def test_a_hooked_layer_is_called():
    model = hf_rocm.prepare(models.build().bfloat16(), force=True)
    hf_rocm.quantize(model, "int8", force=True)
    seen = []
    for name in ("q_proj", "o_proj"):
        layer = getattr(model.model.layers[0].self_attn, name)
        layer.register_forward_hook(lambda module, args, output, name=name: seen.append((name, tuple(output.shape))))
    with torch.no_grad():
        model(IDS[:1, :3], use_cache=False)
    assert seen == [("q_proj", (1, 3, 64)), ("o_proj", (1, 3, 64))]
