"""Small models, groups of plain linear layers, and shared checks for these tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_rocm
from hf_rocm import ops
from hf_rocm.layers import grouped_linear
from hf_rocm.layers.grouped_linear import project
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.weights.fuse import Fused, unfuse
from tests.tolerance import assert_as_good_as_eager

LAYERS = 2
# Attention and MLP of every layer.
GROUPS = 2 * LAYERS
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def build(**changes: Any) -> Any:
    """A stock Llama with GQA. q_proj is square, so that its transpose has the same shape."""
    arguments = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **changes,
    }
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


def prepared(**changes: Any) -> Any:
    model = hf_rocm.prepare(build(**changes), force=True)
    assert live(model) == 2 * model.config.num_hidden_layers
    return model


def unfused(**changes: Any) -> Any:
    """A prepared model without fused weights, for bitwise comparisons with a fused one."""
    model = prepared(**changes)
    for module in model.modules():
        unfuse(module)
    assert live(model) == 0
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def assert_same_results(model: nn.Module, stock: nn.Module) -> None:
    """Compare copies bitwise, because the last bit of a GEMM may depend on the address of a mapped weight.

    With weights at other addresses, logits may differ by a few rounding steps of the largest one. A wrong weight makes
    a far larger difference.
    """
    expected = logits(copy.deepcopy(stock))
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    steps = 16 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=steps * expected.abs().max().item())


def live(model: nn.Module) -> int:
    """The number of groups that would run fused now. Calling this function fuses pending groups."""
    with torch.no_grad():
        return sum(isinstance(grouped_linear.live(module), Fused) for module in model.modules())


def blocks(model: nn.Module) -> int:
    """The number of groups that have a fused block, whether or not it would be used now."""
    return sum(type(module.__dict__.get(SLOT)) is Fused for module in model.modules())


def assert_matches_stock(model: Any, groups: int, *, twin: Any = None) -> None:
    """Check that results are as accurate as stock's with the current weights, and that `groups` groups run fused.

    The fused GEMMs are counted in the recorded calls and in the stored state.
    """
    twin = stock_with_weights_of(model) if twin is None else twin
    eager = logits(twin)
    with ops.recording() as routes:
        actual = logits(model)
    assert_as_good_as_eager(actual, eager, logits(twin.double()))
    gemms = [route for route in routes if route.operation == "linear"]
    assert len(gemms) == groups
    assert live(model) == groups


def stock_with_weights_of(model: Any) -> Any:
    """Build a stock model of the same dtype with copies of the current weights."""
    twin = build(vocab_size=model.config.vocab_size).to(next(model.parameters()).dtype)
    twin.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    # The state dict does not contain the rotary frequencies.
    for name, buffer in model.named_buffers():
        twin.get_buffer(name).copy_(buffer)
    return twin


class Group(nn.Module):
    """Linear layers with the same input, without a model."""

    def __init__(self, *sizes: int, width: int = 16, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, size in zip("abc", sizes, strict=False):
            setattr(self, name, nn.Linear(width, size, bias=bias, dtype=dtype))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple("abc"[: len(self._modules)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = project(self, x)
        return tuple(child(x) for child in self.children()) if parts is None else tuple(parts)


def one_by_one(group: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call the layers one by one, and return their results."""
    return tuple(child(x) for child in group.children())
