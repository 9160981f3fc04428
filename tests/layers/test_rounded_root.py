"""Up to transformers 4.57, GPT-J and CodeGen store the square root of the head dim as a tensor.

Kernels take the scale as a number.
"""

import pytest
import torch

import hf_rocm
from hf_rocm import layers, ops
from tests.coverage import inputs
from tests.coverage.cases import CASES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [row for row in CASES if row.overlay in ("gptj", "codegen")], ids=lambda case: case.id)
def test_the_scale_is_the_reciprocal_of_stocks_root(case, dtype, monkeypatch):
    scales = []
    attention = ops.attention

    def recording(*tensors, scale, **terms):
        scales.append(scale)
        return attention(*tensors, scale=scale, **terms)

    default = torch.get_default_dtype()
    # Set the default dtype, as from_pretrained does while it builds a model.
    torch.set_default_dtype(dtype)
    try:
        model = hf_rocm.prepare(case.build(dtype), force=True)
    finally:
        torch.set_default_dtype(default)
    monkeypatch.setattr(ops, "attention", recording)
    with torch.inference_mode():
        model(**inputs.arguments(case, model))
    roots = [float(module.scale_attn) for module in model.modules() if hasattr(module, "scale_attn")]
    assert scales == [1 / root for root in roots] and {type(scale) for scale in scales} == {float}


def test_the_root_is_rounded_to_the_dtype():
    assert layers.rounded_root(80, torch.bfloat16) == float(torch.tensor(80.0).sqrt().bfloat16()) != 80**0.5
    assert layers.rounded_root(80, torch.float32) == float(torch.tensor(80.0).sqrt())
