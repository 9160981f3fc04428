"""A prepared model is saved like a stock one: with the same names, the same bytes, and ordinary storages."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import LlamaForCausalLM

import hf_rocm
from tests.weights import models
from tests.weights.models import GROUPS, assert_matches_stock, assert_same_results, live


def files(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if "safetensors" in path.name
    }


def test_the_state_dict_equals_stocks(model, stock):
    prepared, expected = model.state_dict(), stock.state_dict()
    assert list(prepared) == list(expected)
    for name, tensor in prepared.items():
        assert torch.equal(tensor, expected[name]) and tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    missing, unexpected = models.build().load_state_dict(prepared)
    assert not missing and not unexpected


@pytest.mark.parametrize("shard", [None, "60KB"])
def test_save_pretrained_writes_the_same_files_as_stock(model, stock, tmp_path, shard):
    size = {"max_shard_size": shard} if shard else {}
    stock.save_pretrained(tmp_path / "stock", **size)
    model.save_pretrained(tmp_path / "prepared", **size)
    assert files(tmp_path / "prepared") == files(tmp_path / "stock")
    assert (len(files(tmp_path / "prepared")) > 2) is (shard is not None)
    # Saving did not change the model.
    assert_matches_stock(model, GROUPS)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "prepared")
    assert live(loaded) == 0
    assert_same_results(loaded, stock)
    # The weights of `loaded` are in a mapped file.
    hf_rocm.prepare(loaded, force=True)
    assert_matches_stock(loaded, GROUPS)
    assert files(tmp_path / "prepared") == files(tmp_path / "stock")


def test_save_model_of_safetensors_writes_the_same_weights_as_stock(model, stock, tmp_path):
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in stock.state_dict().items())
    missing, unexpected = safetensors.torch.load_model(stock, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    assert_matches_stock(model, GROUPS)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, stock.model.layers[0].mlp.up_proj.weight)


def test_a_saved_state_dict_is_as_large_as_stocks(model, stock, tmp_path):
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(stock.state_dict(), tmp_path / "stock.pt")
    assert abs((tmp_path / "model.pt").stat().st_size - (tmp_path / "stock.pt").stat().st_size) < 1024
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    stock.load_state_dict(loaded)
    assert_same_results(stock, models.build())
