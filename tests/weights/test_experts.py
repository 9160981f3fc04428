"""Stacking a list of experts: values, identities, memory, and changes that invalidate the blocks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import live as stacked
from hf_rocm.layers.weight_group import MOVED, SLOT, is_idle
from hf_rocm.overlay import bind
from hf_rocm.weights.experts import Stacked
from tests.tolerance import assert_as_good_as_eager

NAMES = ("w1", "w3", "w2", "act_fn")
E, H, I, K = 5, 16, 24, 2  # noqa: E741 - the alphabet of shapes
IDS = torch.rand(7, E, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :K]
WEIGHTS = torch.rand(7, K, generator=torch.Generator().manual_seed(4))
X = torch.randn(7, H, generator=torch.Generator().manual_seed(5))


class Expert(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.w1, self.w3 = nn.Linear(H, I, bias=bias), nn.Linear(H, I, bias=bias)
        self.w2, self.act_fn = nn.Linear(I, H, bias=bias), nn.SiLU()

    def forward(self, x):
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


# Only stock forwards may be skipped.
Expert.forward.__module__ = "transformers.models.some.modeling_some"


class MoE(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ModuleList([Expert(bias) for _ in range(E)])

    def forward(self, x):
        return self.one_by_one(x)

    def one_by_one(self, x):
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(index == IDS)
            out.index_add_(0, rows, expert(x[rows]) * WEIGHTS[rows, places, None].to(x.dtype))
        return out


def make(bias=False):
    moe = MoE(bias)
    assert Stacked.form(moe, NAMES) is None
    return moe


def check(moe):
    """Check that the stacked blocks and the modules compute the same results."""
    stack = stacked(moe)
    assert stack is not None
    with torch.no_grad():
        output = ops.experts(
            X, stack.gate_up, stack.down, IDS, WEIGHTS, gate_up_bias=stack.gate_up_bias, down_bias=stack.down_bias
        )
        exact = copy.deepcopy(moe).double()
        assert_as_good_as_eager(output, moe.one_by_one(X), exact.one_by_one(X.double()))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_stacking_and_unstacking_keep_values_and_objects(bias):
    moe = MoE(bias)
    parameters = dict(moe.named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    for _ in range(2):
        assert Stacked.form(moe, NAMES) is None and Stacked.why_not(moe, NAMES) is None
    stack = stacked(moe)
    assert stack.gate_up.shape == (E, 2 * I, H) and stack.down.shape == (E, H, I)
    assert (stack.gate_up_bias is not None) is bias
    check(moe)
    for step in ("stacked", "unstacked"):
        for name, parameter in moe.named_parameters():
            assert parameter is parameters[name] and torch.equal(parameter, before[name]), step
        storages = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        # PyTorch reports separate storages.
        assert len(storages) == len(parameters)
        assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters.values())
        Stacked.restore(moe)
    assert stacked(moe) is None and not [name for name in moe.__dict__ if name.startswith("_hf_rocm")]


def test_stacking_needs_no_second_copy():
    moe = make()
    stack = stacked(moe)
    first, last = moe.experts[0], moe.experts[E - 1]
    assert first.w1.weight.data_ptr() == stack.gate_up.data_ptr()
    assert first.w3.weight.data_ptr() == stack.gate_up[0, I:].data_ptr()
    assert last.w2.weight.data_ptr() == stack.down[E - 1].data_ptr()
    blocks = stack.gate_up.nbytes + stack.down.nbytes
    assert blocks == sum(parameter.nbytes for parameter in moe.parameters())


def test_writing_into_a_parameter_writes_into_the_block():
    moe = make()
    moe.experts[2].w2.weight.mul_(2)
    moe.load_state_dict({name: value * 1.5 for name, value in moe.state_dict().items()})
    check(moe)


def replace_parameter(moe):
    moe.experts[1].w1.weight = nn.Parameter(torch.randn(I, H))


def replace_data(moe):
    moe.experts[4].w2.weight.data = torch.randn(H, I)


def transpose_in_place(moe):
    moe.experts[0].w1.weight.data = moe.experts[0].w1.weight.data.view(H, I).t()


def shorten(moe):
    moe.experts[0].w1.weight.data = moe.experts[0].w1.weight.data[: I // 2]


def assign(moe):
    moe.load_state_dict({name: value.clone() for name, value in moe.state_dict().items()}, assign=True)


def drop_an_expert(moe):
    del moe.experts[4]


def swap_experts(moe):
    moe.experts[0], moe.experts[1] = moe.experts[1], moe.experts[0]


@pytest.mark.parametrize(
    "change",
    [replace_parameter, replace_data, transpose_in_place, shorten, assign, drop_an_expert, swap_experts],
    ids=lambda change: change.__name__,
)
def test_a_block_is_freed_when_its_weights_move(change):
    moe = make()
    change(moe)
    assert stacked(moe) is None and is_idle(moe.__dict__[SLOT], MOVED)
    assert Stacked.why_not(moe, NAMES) is not None
    Stacked.restore(moe)


def hook(moe):
    moe.experts[3].register_forward_hook(lambda *_: None)


def hook_a_layer(moe):
    moe.experts[3].w2.register_forward_pre_hook(lambda *_: None)


def hook_an_activation(moe):
    moe.experts[0].act_fn.register_forward_hook(lambda *_: None)


def own_forward(moe):
    moe.experts[2].forward = lambda x: x


def own_forward_of_a_layer(moe):
    moe.experts[2].w3.forward = lambda x: x


def an_adapter(moe):
    moe.experts[2].w3 = nn.Sequential(moe.experts[2].w3)


def another_class(moe):
    moe.experts[2].w3.__class__ = type("Other", (nn.Linear,), {})


@pytest.mark.parametrize(
    "touch",
    [hook, hook_a_layer, hook_an_activation, own_forward, own_forward_of_a_layer, an_adapter, another_class],
    ids=lambda touch: touch.__name__,
)
def test_experts_changed_by_the_user_are_not_stacked(touch):
    moe = make()
    touch(moe)
    assert stacked(moe) is None
    assert Stacked.why_not(moe, NAMES) is not None


def test_with_gradients_the_modules_run():
    moe = make()
    with torch.enable_grad():
        assert stacked(moe) is None
        assert "no_grad" in Stacked.why_not(moe, NAMES)
    assert stacked(moe) is not None
    moe.requires_grad_(False)
    with torch.enable_grad():
        assert stacked(moe) is not None


def test_with_functional_call_the_modules_run():
    moe = make()
    lent = {name: torch.zeros_like(value) for name, value in moe.named_parameters()}
    seen = []
    moe.forward = lambda: seen.append(stacked(moe))
    torch.func.functional_call(moe, lent, ())
    assert seen == [None] and isinstance(stacked(moe), Stacked)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_a_copy_has_separate_blocks(duplicate):
    moe = make()
    twin = duplicate(moe)
    assert isinstance(stacked(twin), Stacked) and stacked(twin) is not stacked(moe)
    twin.experts[0].w1.weight.zero_()
    check(twin)
    check(moe)


def test_the_experts_of_a_moved_model_are_stacked_again():
    bind.replaces(MoE, experts=NAMES)(lambda self, stock, x: stock(self, x))
    try:
        moe = make().to(torch.bfloat16)
        stack = stacked(moe)
        assert stack is not None and stack.gate_up.dtype == torch.bfloat16
        assert stack.gate_up.data_ptr() == moe.experts[0].w1.weight.data_ptr()
    finally:
        bind.unbind(MoE)
    assert "_apply" not in MoE.__dict__


def test_lists_of_different_experts_are_refused():
    assert Stacked.form(nn.Module(), NAMES) == "there is no list of two or more experts"
    other = MoE()
    other.experts[1].act_fn = nn.GELU()
    assert "activation of expert 1" in Stacked.form(other, NAMES)
    other = MoE()
    other.experts[1].w3 = nn.Linear(H, I, bias=True)
    assert "bias" in Stacked.form(other, NAMES)
    other = MoE()
    other.experts[2].to("meta")
    assert "meta" in Stacked.form(other, NAMES)
    other = MoE()
    other.experts[2].w1.weight = other.experts[3].w1.weight
    assert "share memory" in Stacked.form(other, NAMES)
    assert SLOT not in other.__dict__
