"""Heads of fused layers, and rotary embeddings that cover only part of the head dim."""

from __future__ import annotations

import pytest
import torch
from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

from hf_rocm import layers, ops
from hf_rocm.weights import fuse

B, S, H, D, R = 2, 5, 3, 16, 8


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(B, heads, S, D, generator=generator) for heads in (H, 1))
    angles = torch.rand(1, S, R // 2, generator=generator).repeat(1, 1, 2)
    return query, key, (angles.cos(), angles.sin())


def expected(query, key, position_embeddings):
    rotated = apply_rotary_pos_emb(query[..., :R], key[..., :R], *position_embeddings)
    return [torch.cat((part, whole[..., R:]), dim=-1) for part, whole in zip(rotated, (query, key), strict=True)]


def test_the_kernel_runs_if_the_dtypes_are_equal(case):
    query, key, position_embeddings = case
    with ops.recording() as routes:
        actual = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings, partial=True)
    assert [route.operation for route in routes] == ["rope"]
    torch.testing.assert_close(list(actual), expected(*case))


def test_the_models_function_runs_if_the_dtypes_differ(case):
    """Under autocast, for example, the projections are bf16, while cos and sin are fp32."""
    query, key, position_embeddings = case
    query, key = query.bfloat16(), key.bfloat16()
    with ops.recording() as routes:
        actual = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings, partial=True)
    assert routes == []
    for result, reference in zip(actual, expected(query, key, position_embeddings), strict=True):
        assert torch.equal(result, reference)


@pytest.mark.parametrize("s", [1, 63])
def test_heads_of_fused_layers_equal_those_of_separate_layers(s):
    """There are fewer key heads than query heads. The shapes are equal, and the values are equal up to rounding."""
    names, heads = ("q_proj", "k_proj", "v_proj"), (6, 2, 2)
    module = torch.nn.Module()
    for name, count in zip(names, heads, strict=True):
        module.add_module(name, torch.nn.Linear(7, count * D))
    x = torch.randn(B, s, 7)
    with torch.no_grad():
        expected = layers.split_heads(tuple(module._modules[name](x) for name in names), D)
        assert fuse.fuse(module, names) is None
        actual = layers.heads(module, x, *names, head_dim=D)
        plain = layers.split_heads(layers.project(module, x, *names), D)
    # The parts are views of one GEMM's output.
    assert len({part.untyped_storage().data_ptr() for part in actual}) == 1
    for result, reference, view, count in zip(actual, expected, plain, heads, strict=True):
        assert result.shape == (B, count, s, D) and result.storage_offset() == view.storage_offset()
        assert s == 1 or result.stride() == view.stride()
        torch.testing.assert_close(result, reference)


def test_a_wrong_head_size_raises_as_in_separate_layers():
    module = torch.nn.Module()
    for name in ("q_proj", "k_proj"):
        module.add_module(name, torch.nn.Linear(7, 12))
    with torch.no_grad():
        assert fuse.fuse(module, ("q_proj", "k_proj")) is None
        with pytest.raises(RuntimeError):
            layers.heads(module, torch.randn(B, S, 7), "q_proj", "k_proj", head_dim=8)
