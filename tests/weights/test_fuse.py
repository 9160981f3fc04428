"""fuse, live, project and unfuse on plain groups: values, identities, memory, and changes that invalidate a block."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from hf_rocm.layers.grouped_linear import live, project
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.weights import fuse
from hf_rocm.weights.fused_storage import block_of
from tests.tolerance import assert_as_good_as_eager
from tests.weights.models import Group, one_by_one

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))


def make(*, bias=False, sizes=(16, 8, 4), dtype=torch.float32):
    group = Group(*sizes, bias=bias, dtype=dtype)
    assert fuse.fuse(group, group.names) is None
    return group


def check(group, x=X):
    """Check that the fused forward equals the layers' forwards within the derived tolerance."""
    with torch.no_grad():
        wide = copy.deepcopy(group)
        fuse.unfuse(wide)
        expected = one_by_one(wide.double(), x.double())
        for actual, eager, reference in zip(group(x), one_by_one(group, x), expected, strict=True):
            assert_as_good_as_eager(actual, eager, reference)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 9).map(lambda n: 4 * n), min_size=2, max_size=3),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rows=st.sampled_from([1, 63]),
)
def test_fusing_and_unfusing_keep_values_and_objects(sizes, bias, dtype, rows):
    group = Group(*(2 * size for size in sizes), bias=bias, dtype=dtype)
    parameters = dict(group.named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    for _ in range(2):
        with torch.no_grad():
            assert fuse.fuse(group, group.names) is None
            block = live(group)
            assert block is not None and block.weight.shape == (2 * sum(sizes), 16)
            check(group, torch.randn(rows, 16).to(dtype))
    for _ in range(2):
        fuse.unfuse(group)
        assert live(group) is None
        for name, parameter in group.named_parameters():
            assert parameter is parameters[name] and torch.equal(parameter, before[name])
            assert parameter.requires_grad and parameter.untyped_storage().resizable()
    assert not [name for name in group.__dict__ if "hf_rocm" in name]


@pytest.mark.parametrize("bias", [False, True])
def test_every_parameter_has_its_own_storage_over_its_part_of_the_block(bias):
    group = make(bias=bias)
    block = live(group)
    row = 0
    for linear in group.children():
        weight = linear.weight
        assert weight.untyped_storage().nbytes() == weight.nbytes and weight.storage_offset() == 0
        assert weight.data_ptr() == block.weight[row:].data_ptr()
        row += len(weight)
    storages = {parameter.untyped_storage().data_ptr() for parameter in group.parameters()}
    assert len(storages) == len(list(group.parameters()))
    assert (block.bias is not None) is bias
    assert not list(group.buffers()) and list(group.state_dict()) == list(Group(16, 8, 4, bias=bias).state_dict())


def test_fusing_again_keeps_the_block_and_another_order_makes_a_new_one():
    group = make()
    block = live(group)
    assert fuse.fuse(group, ["a", "b", "c"]) is None and live(group) is block
    assert fuse.fuse(group, ["b", "a"]) is None
    assert live(group).names == ("b", "a")
    assert group.c.weight.untyped_storage().resizable()
    assert torch.equal(live(group).weight, torch.cat([group.b.weight, group.a.weight]))


def test_parameters_keep_their_attributes_and_gradients():
    group = Group(16, 8)
    group.a.weight.mark = "kept"
    group.a.weight.grad = torch.ones(16, 16)
    fuse.fuse(group, group.names)
    assert group.a.weight.mark == "kept" and group.a.weight.grad.sum() == 256


def test_parameters_created_under_inference_mode_are_fused():
    with torch.inference_mode():
        group = Group(16, 8, bias=True)
    assert fuse.fuse(group, group.names) is None
    assert group.a.weight.is_inference() and live(group) is not None
    check(group)
    with torch.inference_mode():
        group.a.weight.mul_(2)
    check(group)
    fuse.unfuse(group)
    assert group.a.weight.is_inference() and group.a.bias.is_inference()


def test_ordinary_parameters_fused_under_inference_mode_stay_ordinary():
    group = Group(16, 8)
    with torch.inference_mode():
        assert fuse.fuse(group, group.names) is None
        assert live(group) is not None
    assert not group.a.weight.is_inference()
    with torch.enable_grad():
        group.a(X).sum().backward()
    group.a.weight.add_(1)
    check(group)


# Functions that change a fused group. They return (whether the block is kept, whether it would be used).
def _in_place(group):
    group.b.weight.mul_(3)
    return True, True


def _copy_load(group):
    group.load_state_dict(Group(16, 8, 4, bias=group.a.bias is not None).state_dict())
    return True, True


def _assign_load(group):
    group.load_state_dict(Group(16, 8, 4, bias=group.a.bias is not None).state_dict(), assign=True)
    return False, False


def _data(group):
    group.b.weight.data = torch.randn(8, 16)
    return False, False


def _new_parameter(group):
    group.c.weight = nn.Parameter(torch.randn(4, 16))
    return False, False


def _new_layer(group):
    group.a = nn.Linear(16, 16, bias=group.a.bias is not None)
    return False, False


def _transposed_in_place(group):
    # The weight is square, so its address and shape don't change.
    group.a.weight.data = group.a.weight.data.t()
    return False, False


def _shortened(group):
    for linear in group.children():
        linear.weight.data = linear.weight.data[:2]
        linear.bias = None if linear.bias is None else nn.Parameter(linear.bias.data[:2])
    return False, False


def _bias_appears(group):
    group.b.bias = nn.Parameter(torch.randn(8))
    return False, False


def _hook(group):
    group.b.register_forward_hook(lambda module, inputs, output: output * 2)
    return True, False


def _pre_hook(group):
    group.b.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    return True, False


def _own_forward(group):
    group.b.forward = lambda x: x[..., :8] * 2
    return True, False


def _parametrized(group):
    nn.utils.parametrizations.weight_norm(group.b)
    group.b.parametrizations.weight.original0.mul_(2)
    return True, False


def _pruned(group):
    prune.l1_unstructured(group.b, "weight", amount=0.5)
    return True, False


def _wrapped(group):
    group.b = nn.Sequential(group.b, nn.ReLU())
    return True, False


def _subclassed(group):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    group.b.__class__ = Doubled
    return True, False


CHANGES = [
    _in_place,
    _copy_load,
    _assign_load,
    _data,
    _new_parameter,
    _new_layer,
    _transposed_in_place,
    _shortened,
    _bias_appears,
    _hook,
    _pre_hook,
    _own_forward,
    _parametrized,
    _pruned,
    _wrapped,
    _subclassed,
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_the_next_call_uses_the_changed_layers(change, bias):
    group = make(bias=bias)
    before = one_by_one(group, X)
    kept, runs = change(group)
    outputs, expected = group(X), one_by_one(group, X)
    changed = [old.shape != new.shape or not torch.equal(old, new) for old, new in zip(before, expected, strict=True)]
    assert any(changed)
    for actual, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, reference)
    assert (live(group) is not None) is runs
    assert (type(group.__dict__[SLOT]) is fuse.Fused) is kept
    assert (fuse.why_not(group, group.names) is None) is runs


def test_a_removed_bias_is_not_added():
    group = make(bias=True)
    group.b.bias = None
    for actual, reference in zip(group(X), one_by_one(group, X), strict=True):
        torch.testing.assert_close(actual, reference)
    assert type(group.__dict__[SLOT]) is not fuse.Fused and "only a, c have a bias" in fuse.why_not(group, group.names)


def test_a_stale_block_is_freed_and_can_be_rebuilt():
    group = make()
    block = live(group)
    _assign_load(group)
    group(X)
    assert "replaced or moved" in fuse.why_not(group, group.names)
    del block
    assert not block_of([group.a.weight, group.b.weight, group.c.weight], [])
    assert fuse.fuse(group, group.names) is None and live(group) is not None
    check(group)


def test_hooks_on_all_modules_are_called():
    group, seen = make(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        group(X)
        assert group.b in seen and "all modules" in fuse.why_not(group, group.names)
    finally:
        handle.remove()
    assert live(group) is not None


def test_functional_call_uses_its_weights_and_keeps_the_block():
    group = make()
    lent = {name: torch.randn_like(tensor) for name, tensor in group.named_parameters()}
    outputs = torch.func.functional_call(group, lent, (X,))
    for actual, name in zip(outputs, lent, strict=True):
        torch.testing.assert_close(actual, nn.functional.linear(X, lent[name]))
    assert live(group) is not None
    check(group)


@pytest.mark.parametrize("bias", [False, True])
def test_with_gradients_the_layers_run_and_equal_stock(bias):
    group, twin = make(bias=bias), Group(16, 8, 4, bias=bias)
    twin.load_state_dict(group.state_dict())
    with torch.enable_grad():
        assert live(group) is None and "gradients are enabled" in fuse.why_not(group, group.names)
        for entry in (group, twin):
            sum(part.square().sum() for part in entry(X)).backward()
            torch.optim.AdamW(entry.parameters(), lr=0.1).step()
    for one, other in zip(group.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad) and torch.equal(one, other)
    # The optimizer's step was in place.
    assert live(group) is not None
    check(group)


def test_layers_run_one_by_one_if_only_the_input_requires_grad():
    group = make().requires_grad_(False)
    with torch.enable_grad():
        assert live(group) is not None
        assert project(group, X) is not None
        assert project(group, X.clone().requires_grad_()) is None


def test_concurrent_first_calls_and_concurrent_invalidation_are_safe():
    for _ in range(20):
        group = copy.deepcopy(make())
        errors, start = [], threading.Barrier(4)

        def call(group=group, errors=errors, start=start):
            try:
                with torch.no_grad():
                    start.wait()
                    for turn in range(20):
                        for part, size in zip(group(X), (16, 8, 4), strict=True):
                            assert part.shape == (3, size)
                        if turn == 10 and threading.current_thread().name == "changer":
                            group.b.weight = nn.Parameter(torch.randn(8, 16))
            except Exception as error:  # noqa: BLE001  # otherwise a thread's error would be lost
                errors.append(error)

        threads = [threading.Thread(target=call, name="changer" if not n else None) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert live(group) is None
        check(group)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_jit_traces_contain_parameters_and_no_block():
    group = make()
    trace = torch.jit.trace(group, X, check_trace=False)
    group.b.weight.data = torch.zeros(8, 16)
    group.a.weight.mul_(2)
    for actual, reference in zip(trace(X), one_by_one(group, X), strict=True):
        torch.testing.assert_close(actual, reference)
