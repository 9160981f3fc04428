"""transformers loads a dummy checkpoint, which takes little disk space, and every rank fills its shards correctly."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from hf_rocm.tools.bench import dummy_checkpoint, known_shapes, shapes

SMALLER = {
    "gemma2-9b": {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3-8b": {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.fixture
def smaller(monkeypatch):
    """Replace the known shapes in SMALLER with smaller ones of the same kinds."""
    for name, settings in SMALLER.items():
        shape = known_shapes.SHAPES[name]
        sizes = {**shape.settings, **settings, "vocab_size": 512, "intermediate_size": 64}
        monkeypatch.setitem(
            known_shapes.SHAPES, name, known_shapes.Shape(shape.checkpoint, shape.config, shape.model, sizes)
        )


@pytest.mark.parametrize("name", ["small", *SMALLER])
def test_the_filled_model_is_like_one_built_from_the_config(name, smaller, tmp_path):
    dummy_checkpoint.write(tmp_path, name, dtype=torch.float32, layers=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    dummy_checkpoint.fill(loaded, tmp_path, rank=0)
    built = shapes.build(name, device=torch.device("cpu"), dtype=torch.float32, layers=2)
    expected = dict(built.named_parameters())
    assert {path: parameter.shape for path, parameter in loaded.named_parameters()} == {
        path: value.shape for path, value in expected.items()
    }
    for path, parameter in loaded.named_parameters():
        if parameter.ndim < 2:
            assert torch.equal(parameter, expected[path]), path
        else:
            assert parameter.std().item() == pytest.approx(parameter.shape[-1] ** -0.5, rel=0.1), path
    with torch.no_grad():
        logits = loaded(torch.arange(10, 20)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_file_gets_the_values_that_a_rank_would_get(dtype, tmp_path):
    dummy_checkpoint.write(tmp_path, "small", dtype=dtype, layers=2)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    dummy_checkpoint.fill(expected, tmp_path, rank=0)
    dummy_checkpoint.fill_file(tmp_path, device=torch.device("cpu"), dtype=dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for (path, one), other in zip(loaded.named_parameters(), expected.parameters(), strict=True):
        assert one.dtype == dtype and torch.equal(one, other), path


def test_a_dummy_checkpoint_takes_little_disk_space(tmp_path):
    dummy_checkpoint.write(tmp_path, "small", dtype=torch.bfloat16)
    result = (tmp_path / dummy_checkpoint.MATRICES).stat()
    assert result.st_size > 7_000_000 and result.st_blocks * 512 < 200_000


def test_shards_differ_between_ranks_and_replicated_parameters_do_not(tmp_path):
    dummy_checkpoint.write(tmp_path, "small", dtype=torch.float32, layers=1)
    first = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    # simulate a rank's rows of q
    query = first.model.layers[0].self_attn.q_proj
    query.weight = torch.nn.Parameter(query.weight[:128].clone())
    second = copy.deepcopy(first)
    for rank, model in enumerate((first, second)):
        dummy_checkpoint.fill(model, tmp_path, rank=rank)
    for (path, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other) is ("q_proj" not in path), path
