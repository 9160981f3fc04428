"""Fixtures for serving: a simulated memory size, page tables on a CPU, and a checkpoint with distinct answers."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest
import torch
import transformers

from tests.serving.batching import HAS_BATCHING, memory_is_known


@pytest.fixture
def real_memory():
    """Don't simulate the memory size."""


@pytest.fixture(autouse=True)
def simulated_memory(request, monkeypatch):
    """Simulate a memory size in releases that read only an accelerator's memory and fail without an accelerator."""
    if "real_memory" in request.fixturenames or HAS_BATCHING is False or memory_is_known():
        return
    from transformers.generation.continuous_batching import cache

    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), 2**28, 0, 0))


@pytest.fixture
def page_tables_on_cpu(monkeypatch):
    """Enable transformers' decoding with page tables, which it uses only on a GPU."""
    initialization = importlib.import_module("transformers.generation.continuous_batching.initialization")
    if not hasattr(initialization, "is_torch_xpu_available"):
        pytest.skip("not run: this release has page tables on CUDA only")
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda: True)


@pytest.fixture(scope="session")
def chatty_checkpoint(tmp_path_factory, tiny_checkpoint):
    """A checkpoint with the tiny one's config, its tokenizer with a chat template, and random weights.

    The weights are so large that all prompts have different answers.
    """
    folder = tmp_path_factory.mktemp("chatty")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = transformers.AutoConfig.from_pretrained(tiny_checkpoint)
    config.eos_token_id = None
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    # the servers pass all outputs of the tokenizer to the model, so restrict the outputs
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **names}))
    yield folder
    shutil.rmtree(folder)
