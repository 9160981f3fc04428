"""The fused GEMM under torch.compile and torch.export: one graph stays correct after any change to the weights."""

from __future__ import annotations

import accelerate.hooks
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import live, product
from hf_rocm.weights import fuse
from tests.weights.models import Group, one_by_one

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compiled(group, backend="eager", *, fullgraph=True):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(group, backend=counter, fullgraph=fullgraph), counter


def calls(counter):
    return [str(node.target) for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]


def check(run, group):
    for actual, expected in zip(run(X), one_by_one(group, X), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_stays_correct_after_every_change_to_the_weights(backend, bias):
    group = Group(16, 8, 4, bias=bias)
    fuse.fuse(group, group.names)
    run, counter = compiled(group, backend)

    def fused_rows():
        """Returns the number of rows of the weight in every call to `linear`."""
        with ops.recording() as routes:
            check(run, group)
        return [route.shapes[1][0] for route in routes if route.operation == "linear"]

    assert fused_rows() == [28]
    group.a.weight.mul_(2)
    assert fused_rows() == [28]
    group.load_state_dict(Group(16, 8, 4, bias=bias).state_dict())
    assert fused_rows() == [28]
    group.b.weight.data = torch.randn(8, 16)
    assert fused_rows() == [16, 8, 4]
    group.c.weight = nn.Parameter(torch.randn(4, 16))
    assert fused_rows() == [16, 8, 4]
    group.load_state_dict(Group(16, 8, 4, bias=bias).state_dict(), assign=True)
    assert fused_rows() == [16, 8, 4]
    if bias:
        assert fuse.fuse(group, group.names) is None
        group.b.bias.data = torch.randn(8)
        assert fused_rows() == [16, 8, 4]
    fuse.fuse(group, group.names)
    assert fused_rows() == [28]
    assert counter.frame_count == 1 and calls(counter).count("hf_rocm.linear_group") == 1


def test_the_graph_has_the_parameters_and_no_second_copy():
    group = Group(16, 8, 4)
    fuse.fuse(group, group.names)
    run, counter = compiled(group)
    run(X)
    inputs = [node for node in counter.graphs[0].graph.nodes if node.op == "placeholder"]
    # x and three weights.
    assert len(inputs) == 4


def test_the_plain_gemm_is_traced_too():
    group = Group(16, 8)
    fuse.fuse(group, group.names)
    joined = torch.compile(lambda x: product(group, x), backend="eager", fullgraph=True)(X)
    torch.testing.assert_close(joined, torch.cat(one_by_one(group, X), dim=-1))


@pytest.mark.parametrize("change", ["unfused", "hook", "forward", "class"])
def test_changed_layers_are_called(change):
    group = Group(16, 8, 4)
    if change != "unfused":
        fuse.fuse(group, group.names)
    if change == "hook":
        group.b.register_forward_hook(lambda module, inputs, output: output * 2)
    elif change == "forward":
        group.b.forward = lambda x: x[..., :8]
    elif change == "class":
        group.b = nn.Sequential(group.b, nn.ReLU())
    run, counter = compiled(group)
    check(run, group)
    assert "hf_rocm.linear_group" not in calls(counter)


def test_accelerates_hooks_are_traced():
    group = Group(16, 8)
    for linear in group.children():
        accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.AlignDevicesHook("cpu"))
    fuse.fuse(group, group.names)
    # accelerate's code breaks the graph.
    run, counter = compiled(group, fullgraph=False)
    check(run, group)
    assert "hf_rocm.linear_group" not in calls(counter)


def test_gradients_equal_those_of_the_layers():
    group, twin = Group(16, 8, bias=True), Group(16, 8, bias=True)
    twin.load_state_dict(group.state_dict())
    fuse.fuse(group, group.names)
    run, counter = compiled(group, "aot_eager")
    with torch.enable_grad():
        for call, entry in ((run, group), (twin, twin)):
            x = X.clone().requires_grad_()
            sum(part.square().sum() for part in call(x)).backward()
            entry.x_grad = x.grad
        torch.testing.assert_close(group.x_grad, twin.x_grad)
        for one, other in zip(group.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        group.requires_grad_(False)
        x = X.clone().requires_grad_()
        sum(part.square().sum() for part in run(x)).backward()
        torch.testing.assert_close(x.grad, twin.x_grad)
    assert "hf_rocm.linear_group" not in calls(counter)
    run(X)
    assert "hf_rocm.linear_group" in calls(counter)


def test_autocast_inside_a_graph_applies():
    group = Group(16, 8)
    fuse.fuse(group, group.names)
    run, _ = compiled(group, "aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert [part.dtype for part in run(X)] == [torch.bfloat16] * 2


def test_one_graph_supports_dynamic_shapes():
    group = Group(16, 8)
    fuse.fuse(group, group.names)
    run = torch.compile(group, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (2, 3, 63):
        assert run(torch.randn(rows, 16))[1].shape == (rows, 8)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_run_without_hf_rocm_and_have_no_second_copy(strict):
    group = Group(16, 8, 4)
    fuse.fuse(group, group.names)
    program = torch.export.export(group, (X,), strict=strict)
    assert "hf_rocm" not in str(program.graph)
    assert list(program.state_dict) == list(group.state_dict()) and not program.constants
    check(program.module(), group)
    assert live(group) is not None


def test_the_custom_op_passes_opcheck():
    weights = [torch.randn(8, 16), torch.randn(4, 16)]
    torch.library.opcheck(torch.ops.hf_rocm.linear_group.default, (X, weights, []))
    torch.library.opcheck(torch.ops.hf_rocm.linear_group.default, (X, weights, [torch.randn(8), torch.randn(4)]))
