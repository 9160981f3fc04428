"""Reasons for not fusing a group. A group that is not fused is unchanged."""

from __future__ import annotations

import accelerate.hooks
import pytest
import torch
from torch import nn

from hf_rocm.layers.grouped_linear import live, project
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.weights import fuse
from tests.weights.models import Group


class Int8Linear(nn.Linear):
    """A stand-in for other libraries' quantised layers: a subclass of `nn.Linear`."""


class Quantised(torch.Tensor):
    """A tensor subclass, like DTensor and those of torchao."""


def _no_such_layer(group):
    del group.b


def _quantised_layer(group):
    group.b = Int8Linear(16, 8)


def _quantised_weight(group):
    quantised = torch.randn(8, 16).as_subclass(Quantised)
    group.b.weight = nn.Parameter(quantised, requires_grad=False)


def _plain_tensor(group):
    del group.b.weight
    group.b._parameters["weight"] = torch.randn(8, 16)


def _hooked(group):
    group.b.register_forward_pre_hook(lambda module, inputs: None)


def _own_forward(group):
    group.b.forward = lambda x: x


def _meta(group):
    group.b.to("meta")


def _offloaded(group):
    accelerate.cpu_offload(group, execution_device="cpu")


def _sequence_of_hooks(group):
    for _ in range(2):
        accelerate.hooks.add_hook_to_module(group.b, accelerate.hooks.ModelHook(), append=True)


def _integers(group):
    group.b.weight = nn.Parameter(torch.ones(8, 16, dtype=torch.int8), requires_grad=False)


def _float8(group):
    group.b.weight = nn.Parameter(torch.ones(8, 16).to(torch.float8_e4m3fn), requires_grad=False)


def _transposed(group):
    group.b.weight.data = torch.randn(16, 8).t()


def _view(group):
    group.b.weight.data = torch.randn(16, 16)[:8]


def _empty(group):
    group.b.weight = nn.Parameter(torch.empty(0, 16))


def _between_processes(group):
    group.b.share_memory()


def _dtypes(group):
    group.b.half()


def _inputs(group):
    group.b = nn.Linear(12, 8, bias=False)


def _part_biased(group):
    group.b = nn.Linear(16, 8)


def _inference(group):
    with torch.inference_mode():
        group.b = nn.Linear(16, 8, bias=False)


def _tied(group):
    group.b.weight = group.a.weight


def _aliased(group):
    group.b.weight = nn.Parameter(group.a.weight.data)


def _odd(group):
    group.a = nn.Linear(16, 3, bias=False, dtype=torch.float16)
    group.b.half()
    group.a.weight.data = torch.randn(3, 16).half()[:, :10].contiguous()
    group.b.weight.data = torch.randn(8, 10).half()


REASONS = [
    (_no_such_layer, "there is no b"),
    (_quantised_layer, "b is of type tests.weights.test_eligible.Int8Linear, not a plain nn.Linear"),
    (_quantised_weight, "b has a weight that is of type Quantised, not Parameter"),
    (_plain_tensor, "b has a weight that is of type Tensor, not Parameter"),
    (_hooked, "b has a forward hook"),
    (_own_forward, "b has its own forward"),
    (_meta, "b has a weight that is on the meta device"),
    (_offloaded, "a is run by a hook (AlignDevicesHook) that may move its weights"),
    (_sequence_of_hooks, "b is run by a hook (SequentialHook) that may move its weights"),
    (_integers, "b has a weight that is torch.int8, but only float64, float32, float16, bfloat16 are fused"),
    (_float8, "b has a weight that is torch.float8_e4m3fn, but only float64, float32, float16, bfloat16 are fused"),
    (_transposed, "b has a weight that is not contiguous in memory"),
    (_view, "b has a weight that is a view of a larger storage"),
    (_empty, "b has a weight that is empty"),
    (_between_processes, "b has a weight that is in memory shared with other processes"),
    (_dtypes, "b and a differ in dtype: torch.float16 and torch.float32"),
    (_inputs, "b and a differ in input features: 12 and 16"),
    (_part_biased, "only b has a bias"),
    (_inference, "b and a differ in inference mode: True and False"),
    (_tied, "the layers share memory with each other"),
    (_aliased, "the layers share memory with each other"),
    (_odd, "the weight of b would not start at a multiple of 16 bytes"),
]


@pytest.mark.parametrize(("change", "sentence"), REASONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_refused_group_is_unchanged_and_has_a_reason(change, sentence):
    group = Group(16, 8)
    change(group)
    before = {name: (id(p), p.data_ptr(), p.dtype) for name, p in group.named_parameters() if not p.is_meta}
    with torch.no_grad():
        assert fuse.fuse(group, ("a", "b")) == sentence
        assert fuse.why_not(group, ("a", "b")) == sentence
    assert {name: (id(p), p.data_ptr(), p.dtype) for name, p in group.named_parameters() if not p.is_meta} == before
    assert SLOT not in group.__dict__


def test_a_single_layer_is_not_a_group():
    assert fuse.fuse(Group(16), ("a",)) == "there is nothing to fuse in fewer than two layers"


def test_inconsistent_biases_are_refused():
    group = Group(16, 8, bias=True)
    group.b.bias.data = torch.zeros(8, dtype=torch.float64)
    assert fuse.fuse(group, group.names) == "the weight and the bias of b differ in dtype, device or inference mode"
    group.b.bias.data = torch.zeros(1)
    assert fuse.fuse(group, group.names) == "b has 8 outputs but 1 biases"
    group = Group(2, 8, bias=True)
    assert fuse.fuse(group, group.names) == "the bias of b would not start at a multiple of 16 bytes"


def test_an_accelerate_hook_that_moves_nothing_does_not_prevent_fusing():
    """device_map="auto" with several devices adds hooks to every layer. The test adds them before and after fusing."""
    group, x = Group(16, 8, 4), torch.randn(2, 16)

    def hook():
        for linear in group.children():
            accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.AlignDevicesHook("cpu"))
            assert "forward" in linear.__dict__

    with torch.no_grad():
        hook()
        assert fuse.fuse(group, group.names) is None and live(group) is not None
        assert project(group, x) is not None
        accelerate.hooks.remove_hook_from_submodules(group)
        assert live(group) is not None
        hook()
        assert live(group) is not None
        # a hook for another device moves the input, so the layer must be called
        accelerate.hooks.add_hook_to_module(group.b, accelerate.hooks.AlignDevicesHook("meta"))
        assert project(group, x) is None
