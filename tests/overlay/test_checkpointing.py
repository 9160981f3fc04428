"""Gradient checkpointing of decoder layers with a bound forward works as in stock transformers, prepared or not."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_rocm
from tests.parity import models
from tests.tolerance import assert_run_as_good_as_eager


@pytest.mark.parametrize("prepared", [True, False])
def test_a_layer_runs_again_in_the_backward_pass(prepared, tmp_path):
    folder = models.save_checkpoint("llama", tmp_path, torch.float32)
    # This binds the overlay for all later models.
    other = hf_rocm.from_pretrained(folder, force=True)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder)
    if prepared:
        hf_rocm.prepare(model, force=True)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.train()
    runs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    ids = models.tokens(2, 9)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(runs) == 2
    plain.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    wide = transformers.LlamaForCausalLM.from_pretrained(folder).double().train()
    wide(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    actual, eager, expected = (
        {name: parameter.grad for name, parameter in variant.named_parameters()} for variant in (model, plain, wide)
    )
    assert_run_as_good_as_eager(actual, eager, expected, least=1e-3)
    del other
