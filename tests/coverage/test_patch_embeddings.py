"""The patch embeddings of vision models run as GEMMs. test_forward compares the results for images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_rocm import ops
from hf_rocm.weights import patch_embeddings
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.tolerance import assert_as_good_as_eager

VISION = [case for case in CASES if case.kind in ("image", "towers", "image and text", "images in text")]
VIDEO = [case for case in CASES if case.overlay in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")]


@params(VISION)
def test_patches_are_embedded_by_a_gemm(case, trio):
    """Convolutions over patches are replaced. Other models, such as siglip2, flatten the patches for a linear layer."""
    prepared, stock, _ = trio()
    convolutions = {
        name: (module.out_channels, module.weight[0].numel())
        for name, module in stock.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.stride == module.kernel_size
    }
    assert patch_embeddings.in_force(stock) == [] and patch_embeddings.in_force(prepared) == [*convolutions]
    with torch.inference_mode(), ops.recording() as routes:
        prepared(**inputs.arguments(case, prepared))
    assert set(convolutions.values()) <= {route.shapes[1] for route in routes if route.operation == "linear"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@params(VIDEO)
def test_video_patches_are_embedded_by_a_gemm(case, dtype, trio):
    """The input is two clips: one with two pairs of frames, and one with one pair."""
    torch.manual_seed(0)
    pixels = torch.randn(2 * 16 + 8, 96).to(dtype)
    grid = torch.tensor([[2, 4, 4], [1, 2, 4]])
    results = []
    for model in trio(dtype):
        tower = next(module for module in model.modules() if hasattr(module, "patch_embed"))
        weight = tower.patch_embed.proj.weight
        with torch.inference_mode(), ops.recording() as routes:
            patches = tower.patch_embed(pixels.to(weight.dtype))
            output = tower(pixels.to(weight.dtype), grid)
        size = (len(weight), weight[0].numel())
        assert len([route for route in routes if size in route.shapes]) == (2 if not results else 0)
        output = output if torch.is_tensor(output) else output[0]
        results.append((patches, output))
    for prepared, stock, exact in zip(*results, strict=True):
        assert_as_good_as_eager(prepared, stock, exact)
