"""Patches by other libraries take effect as doctor describes, and hf_rocm runs in all other modules."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

import hf_rocm


@pytest.fixture
def prepared():
    """Return a function that prepares and runs a tiny Llama, and counts other libraries' forwards by class."""

    def call(change=None) -> dict[str, int]:
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        hf_rocm.prepare(model, force=True)
        if change:
            change(model)
        with torch.no_grad():
            model(torch.arange(6)[None])
        return {part.cls: part.theirs for part in hf_rocm.explain(model).parts if part.active}

    hf_rocm.deactivate("llama")
    yield call
    hf_rocm.deactivate("llama")


def test_without_other_libraries_every_module_is_served(prepared) -> None:
    served = prepared()
    assert {"LlamaAttention", "LlamaMLP", "LlamaRMSNorm"} <= set(served) and not any(served.values())


def test_a_replaced_class_takes_effect_as_with_liger(prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Norm(nn.Module):
        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden_size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("theirs")
            return x * self.weight

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Norm)
    served = prepared()
    assert len(calls) == 5 and "LlamaAttention" in served and "LlamaRMSNorm" not in served


def test_a_forward_set_on_a_module_takes_effect_as_with_hub_kernels(prepared) -> None:
    calls = []

    def kernel(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append("theirs")
        return x

    def kernelize(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, modeling_llama.LlamaRMSNorm):
                module.forward = MethodType(kernel, module)

    served = prepared(kernelize)
    assert len(calls) == 5 and served["LlamaRMSNorm"] == 5 and not served["LlamaAttention"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_forward_set_on_a_class_takes_effect_as_with_unsloth(
    prepared, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    import functools

    calls = []
    stock = modeling_llama.LlamaAttention.forward

    def replacement(self: nn.Module, *args: object, **kwargs: object) -> object:
        calls.append("theirs")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", functools.wraps(stock)(replacement) if wrapped else replacement
    )
    served = prepared()
    assert len(calls) == 2 and "LlamaAttention" not in served and "LlamaMLP" in served
