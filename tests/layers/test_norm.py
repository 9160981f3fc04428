"""An operation replaces a module only if a call would run nothing but the unchanged forward of the module's class."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

import hf_rocm
from hf_rocm.layers.mlp import activation_of, looks_up
from hf_rocm.layers.norm import is_plain, is_stock
from hf_rocm.overlay.replacements import watches

MODULES = {
    "norm": lambda: nn.LayerNorm(8),
    "dropout": lambda: nn.Dropout(0.0),
    "activation": transformers.activations.NewGELUActivation,
}


class Norm(nn.LayerNorm):
    """A user's own class, with PyTorch's forward."""


def _forward(module, patch):
    module.forward = module.forward


def _class_forward(module, patch):
    forward = type(module).forward
    patch.setattr(type(module), "forward", lambda *args: forward(*args))


def _class_call(module, patch):
    call = type(module).__call__
    patch.setattr(type(module), "__call__", lambda *args: call(*args), raising=False)


def _call(name, module, patch):
    call = getattr(nn.Module, name)
    patch.setattr(nn.Module, name, lambda *args: call(*args))


def _hook_on_all(module, patch):
    handle = torch_module.register_module_forward_pre_hook(lambda *_: None)
    patch.setattr(module, "handle", handle, raising=False)


CHANGES = {
    "hook": lambda module, _: module.register_forward_hook(lambda *_: None),
    "hook before": lambda module, _: module.register_forward_pre_hook(lambda *_: None),
    "hook on gradients": lambda module, _: module.register_full_backward_hook(lambda *_: None),
    "hook on all modules": _hook_on_all,
    "forward": _forward,
    "forward of the class": _class_forward,
    "call of the class": _class_call,
    "call of all modules": partial(_call, "__call__"),
    "body of the call": partial(_call, "_call_impl"),
    "compiled": lambda module, _: module.compile(backend="eager"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODULES)
def test_changed_modules_are_not_plain(name, change, monkeypatch):
    module = MODULES[name]()
    assert is_plain(module)
    with monkeypatch.context() as patch:
        CHANGES[change](module, patch)
        assert not is_plain(module)
        if hasattr(module, "handle"):
            module.handle.remove()
    assert is_plain(MODULES[name]())


@pytest.mark.parametrize("examined", [True, False])
@pytest.mark.parametrize("change", ["forward of the class", "call of the class", "body of the call"])
def test_a_changed_class_is_not_stock_whether_or_not_it_was_examined_before(change, examined, monkeypatch):
    monkeypatch.delitem(watches, nn.LayerNorm, raising=False)
    if examined:
        assert is_stock(nn.LayerNorm)
    with monkeypatch.context() as patch:
        CHANGES[change](nn.LayerNorm(8), patch)
        assert not is_stock(nn.LayerNorm)
    assert is_stock(nn.LayerNorm)


def test_replaced_functions_and_user_classes_are_not_plain(monkeypatch):
    assert not is_plain(Norm(8)) and not is_stock(Norm) and is_plain(nn.LayerNorm(8))
    monkeypatch.setattr(functional, "layer_norm", lambda *args: args[0])
    assert not is_plain(nn.LayerNorm(8)) and is_plain(nn.Dropout())


def test_activations_are_recognised_by_their_function():
    gelu = transformers.activations.GELUActivation()
    assert activation_of(gelu) == "gelu"
    gelu.act = torch.relu
    assert activation_of(gelu) is None
    assert activation_of(transformers.activations.GELUActivation(use_gelu_python=True)) is None
    tanh = transformers.activations.ACT2FN["gelu_pytorch_tanh"]
    assert activation_of(tanh) == "gelu_tanh"
    if "act" in tanh.__dict__:
        tanh.act = partial(torch.nn.functional.softplus, beta=2)
        assert activation_of(tanh) is None


def test_a_gelu_with_a_replaced_function_is_not_recognised(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(functional, "gelu", lambda x: x * 2)
        gelu = transformers.activations.GELUActivation()
    assert activation_of(gelu) is None


def test_activations_are_not_recognised_with_hooks_on_all_modules():
    silu = transformers.activations.ACT2FN["silu"]
    assert activation_of(silu) == "silu"
    handle = torch_module.register_module_forward_hook(lambda *_: None)
    assert activation_of(silu) is None
    handle.remove()
    assert activation_of(silu) == "silu"


def test_changed_lookups_of_activations_are_detected(monkeypatch):
    from transformers.models.llama.modeling_llama import ACT2FN, LlamaMLP

    assert looks_up(LlamaMLP, "silu", "silu") and looks_up(LlamaMLP, "swish", "silu")
    assert not looks_up(LlamaMLP, "gelu", "silu") and not looks_up(LlamaMLP, "missing", "silu")
    with monkeypatch.context() as patch:
        patch.setitem(ACT2FN, "silu", nn.Tanh)
        assert not looks_up(LlamaMLP, "silu", "silu")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[LlamaMLP.__module__], "ACT2FN", {"silu": nn.SiLU})
        assert not looks_up(LlamaMLP, "silu", "silu")
    monkeypatch.setattr(functional, "silu", lambda x, inplace=False: x)
    assert not looks_up(LlamaMLP, "silu", "silu")


SMALL = {"vocab_size": 99, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SMALL, "hidden_size": 64, "intermediate_size": 96}
DECODER = {"vocab_size": 99, "n_layer": 2, "n_head": 4, "n_positions": 64}

# name → config arguments, for models whose attention or MLP has a dropout module
DROPOUTS = {
    "MPNetModel": BERT,
    "ElectraModel": {**BERT, "embedding_size": 64},
    "DistilBertModel": {"vocab_size": 99, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "BloomModel": {"vocab_size": 99, "n_layer": 2, "n_head": 4, "hidden_size": 64},
    "GPT2Model": {**DECODER, "n_embd": 64},
    "GPTJModel": {**DECODER, "n_embd": 64, "rotary_dim": 8},
    "T5EncoderModel": {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
}


def _dropouts(model):
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Dropout]


@pytest.mark.parametrize("name", DROPOUTS)
@torch.no_grad()
def test_changed_dropouts_are_called_as_stock_calls_them(name):
    """A hook on the dropout of attention is a known way to read and change the probabilities."""
    torch.manual_seed(0)
    further = {"feed_forward_proj": "gated-gelu"} if name.startswith("T5") else {}
    family = name.removesuffix("Model").removesuffix("Encoder")
    stock = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**DROPOUTS[name], **further)).eval()
    ids = torch.randint(3, 99, (2, 5))
    outputs, calls = [], []
    for model in (stock, hf_rocm.prepare(deepcopy(stock), force=True)):
        seen = []
        for path, module in _dropouts(model):
            module.register_forward_hook(
                lambda _, args, output, path=path, seen=seen: (seen.append(path), output / 2)[1]
            )
        outputs.append(model(ids)[0])
        calls.append(seen)
        for path, _ in _dropouts(model):
            parent, _, child = path.rpartition(".")
            # nn.Identity has no attribute `p`.
            setattr(model.get_submodule(parent), child, nn.Identity())
        outputs.append(model(ids)[0])
    assert calls[0] == calls[1] and calls[0]
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(outputs[3], outputs[1], rtol=1e-3, atol=1e-4)


# Replaces a class in torch.nn before transformers and hf_rocm are imported. Compares a prepared and a stock model.
REPLACED = """
import copy, sys
import torch
from torch import nn

name, calls = sys.argv[1], []

class Scaled(getattr(nn, name)):
    def forward(self, x):
        calls.append(1)
        return super().forward(x) * 1.25

setattr(nn, name, Scaled)
import transformers, hf_rocm
from hf_rocm import ops

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
stock = transformers.BertModel(config).eval()
prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
ids, outputs, counts = torch.randint(3, 99, (2, 5)), [], []
with torch.no_grad():
    for model in (stock, prepared):
        calls.clear()
        outputs.append(model(ids).last_hidden_state)
        counts.append(len(calls))
torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
assert counts[0] == counts[1] > 4, counts
assert type(stock.encoder.layer[0].output.get_submodule(sys.argv[2])) is Scaled
"""


@pytest.mark.parametrize(("name", "child"), [("LayerNorm", "LayerNorm"), ("Dropout", "dropout"), ("Linear", "dense")])
def test_a_class_that_was_replaced_in_torch_nn_is_detected(name, child, tmp_path):
    script = tmp_path / "replaced.py"
    script.write_text(REPLACED)
    result = subprocess.run([sys.executable, str(script), name, child], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
