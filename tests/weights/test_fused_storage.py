"""Blocks that reuse the memory of their parts. Tensors between the parts are moved, unless something refers to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from hf_rocm.layers.grouped_linear import live as fused
from hf_rocm.weights import fused_storage
from hf_rocm.weights.fuse import fuse

WIDTH = 512
# Each weight takes at least 2 MiB in fp32.
ROWS = {"k": 1024, "o": 1536, "q": 2048, "v": 1024}


@pytest.fixture
def attention(monkeypatch):
    """Four layers with adjacent weights in memory, as transformers loads them onto a GPU, which the CPU simulates."""
    monkeypatch.setattr(fused_storage, "_on_gpu", lambda tensor: True)
    memory = torch.randn(sum(ROWS.values()), WIDTH, generator=torch.Generator().manual_seed(0))
    module, start = nn.Module(), 0
    for name, rows in ROWS.items():
        linear = nn.Linear(WIDTH, rows, bias=False, device="meta")
        linear.weight = nn.Parameter(from_dlpack(memory[start : start + rows]), requires_grad=False)
        module.add_module(name, linear)
        start += rows
    return module


@pytest.fixture
def moved(monkeypatch):
    """Record the tensors that are moved for every fused group."""
    seen = []
    step = fused_storage._make_room
    monkeypatch.setattr(fused_storage, "_make_room", lambda *arguments: seen.append(step(*arguments)) or seen[-1])
    return seen


def values(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_fused(module, before):
    """Check that the layers are fused, and that every weight is unchanged and has separate memory."""
    assert fuse(module, ("q", "k", "v")) is None
    block = fused(module)
    assert block is not None and torch.equal(block.weight, torch.cat([before[f"{name}.weight"] for name in "qkv"]))
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in after.values()}) == len(ROWS)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in after.values())


def test_tensors_between_the_parts_are_moved(attention, moved):
    weights, old = dict(attention.named_parameters()), attention.o.weight.data_ptr()
    assert_fused(attention, values(attention))
    assert moved == [[weights["o.weight"]]] and attention.o.weight.data_ptr() != old
    # The objects are unchanged.
    assert dict(attention.named_parameters()) == weights
    block = fused(attention).weight
    assert not block.data_ptr() <= attention.o.weight.data_ptr() < block.data_ptr() + block.nbytes


def test_a_referenced_weight_is_not_moved(attention, moved):
    view, old = attention.o.weight.detach(), attention.o.weight.data_ptr()
    assert_fused(attention, values(attention))
    assert moved == [[]] and attention.o.weight.data_ptr() == view.data_ptr() == old


def test_contiguous_layers_move_nothing(attention, moved):
    old = {name: parameter.data_ptr() for name, parameter in attention.named_parameters()}
    before = values(attention)
    assert fuse(attention, ("q", "v")) is None
    assert moved == [[]] and all(
        attention.state_dict()[f"{name}.weight"].data_ptr() == old[f"{name}.weight"] for name in "ko"
    )
    assert all(torch.equal(attention.state_dict()[name], tensor) for name, tensor in before.items())


def test_memory_is_exported_on_its_own_device(attention, monkeypatch):
    """PyTorch can only export tensors of the current GPU."""
    current, exported = [], []

    class Device(torch.cuda.device_of):
        def __enter__(self):
            current.append(self)
            super().__enter__()

        def __exit__(self, *error):
            current.pop()
            return super().__exit__(*error)

    monkeypatch.setattr(torch.cuda, "device_of", Device)
    monkeypatch.setattr(fused_storage, "from_dlpack", lambda part: exported.append(bool(current)) or from_dlpack(part))
    assert_fused(attention, values(attention))
    assert len(exported) == 3 + 4 and all(exported) and not current
