"""The checkpoint that the demo trains, and that tests use, is a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_the_checkpoint_loads_and_its_tokenizer_preserves_text(tiny_checkpoint: Path) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert (tiny_checkpoint / "model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    text = 'The "with" statement: naïve → ok\n'
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(tokens[0]) == text
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)(input_ids=tokens).logits
    assert torch.isfinite(logits).all()


def test_the_model_is_trained(tiny_checkpoint: Path) -> None:
    """On average, the tokens of a text have a higher probability than under a uniform distribution."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokens = tokenizer("The statement is executed in the following example.", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        loss = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)(input_ids=tokens, labels=tokens).loss
    assert loss < torch.tensor(float(len(tokenizer))).log()
