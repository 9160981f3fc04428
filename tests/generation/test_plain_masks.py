"""Masks created without vmap equal transformers' masks, and only prepared models use the former."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import masking_utils

import hf_rocm
from hf_rocm.generation import plain_masks
from tests.generation.conftest import make, prompt

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5"), reason="from 5.0 on, transformers creates its masks without vmap"
)


@pytest.fixture
def calls(monkeypatch):
    """Count the masks created with and without vmap."""
    counts = {"vmap": 0, "hf_rocm": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(masking_utils, "_vmap_for_bhqkv", counted("vmap", masking_utils._vmap_for_bhqkv))
    monkeypatch.setattr(plain_masks, "_seen", counted("hf_rocm", plain_masks._seen))
    return counts


def prepared(kind, **changes):
    stock = make(kind, **changes)
    return hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=False), stock


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("beams", [1, 2])
def test_tokens_equal_stock(kind, beams, calls):
    served, stock = prepared(kind)
    call = {**prompt(padded=3), "max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    actual = served.generate(**call)
    assert calls["vmap"] == 0
    assert calls["hf_rocm"] >= 12
    before = dict(calls)
    assert torch.equal(actual, stock.generate(**call))
    assert calls["hf_rocm"] == before["hf_rocm"], "a stock model used hf_rocm's masks"
    assert calls["vmap"] > 0


MASKS = {
    "causal": (masking_utils.create_causal_mask, {}),
    "sliding": (masking_utils.create_sliding_window_causal_mask, {}),
    "packed": (masking_utils.create_causal_mask, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [None, 0, 3])
def test_every_mask_equals_transformers(name, implementation, padded, calls):
    served, stock = prepared("mistral", sliding_window=3)
    make_mask, further = MASKS[name]
    masks = []
    for model in (served, stock):
        model.config._attn_implementation = implementation
        padding = None if padded is None else prompt(padded=padded)["attention_mask"]
        arguments = {
            "config": model.config,
            "input_embeds": torch.zeros(2, 7, 32),
            "attention_mask": padding,
            "cache_position": torch.arange(7),
            "past_key_values": None,
        }
        masks.append(make_mask(**arguments, **further))
    assert calls["hf_rocm"] == 1
    if masks[1] is None:
        assert masks[0] is None
    else:
        assert masks[0].dtype == masks[1].dtype
        assert torch.equal(*masks)


def test_a_users_own_function_goes_through_vmap(calls):
    served, _ = prepared("llama")

    def user_mask(batch, head, query, key):
        return key == 0

    masking_utils.create_causal_mask(
        config=served.config,
        input_embeds=torch.zeros(2, 7, 32),
        attention_mask=None,
        cache_position=torch.arange(7),
        past_key_values=None,
        or_mask_function=user_mask,
    )
    assert calls == {"vmap": 1, "hf_rocm": 0}


# PyTorch's vmap raises this warning.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_restored_and_compiled_models_have_transformers_masks(monkeypatch):
    served, stock = prepared("llama")
    hf_rocm.restore(served)
    # A call to `_seen` would raise.
    monkeypatch.setattr(plain_masks, "_seen", None)
    with torch.no_grad():
        expected = stock(**prompt(padded=3)).logits
        assert torch.equal(served(**prompt(padded=3)).logits, expected)
        compiled = torch.compile(stock.forward, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**prompt(padded=3)).logits, expected)
