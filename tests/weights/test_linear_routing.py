"""route_linear and routed_linear: the kernels that run, the layers that stay stock, and the state after restoring."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.aiter import detect
from hf_rocm.weights import linear_routing
from hf_rocm.weights.instance_forward import is_attached
from tests.aiter import recorded
from tests.aiter.machine import pretend
from tests.replacing import replaced, scaled

BF16 = torch.bfloat16


class Quantised(nn.Linear):
    """A stand-in for a quantised layer, or for any other subclass of `nn.Linear`."""


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(32, 16)

    def forward(self, x):
        return self.dense(x)


class Net(nn.Module):
    """A model without an overlay."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.special = Quantised(32, 32)
        self.head = Head()
        self.lm_head = nn.Linear(16, 8)

    def forward(self, x):
        return self.lm_head(self.head(self.special(torch.relu(self.up(x)))))


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert nn.Linear.__dict__["forward"].__module__ == "torch.nn.modules.linear"
    yield
    assert nn.Linear.__dict__["forward"].__module__ == "torch.nn.modules.linear"


@pytest.fixture
def net():
    return Net().eval()


@pytest.fixture
def aiter(monkeypatch):
    release = recorded.release(recorded.RELEASES[-1])
    monkeypatch.setattr(detect, "load", lambda: release)
    pretend(monkeypatch, "gfx942")
    with options.override(probe=False):
        yield
    options._forget_choices()


def routes(model, x):
    with torch.no_grad(), ops.recording() as recorded:
        output = model(x)
    return output, [(route.tier, route.shapes[1]) for route in recorded if route.operation == "linear"]


ALL = [(32, 16), (16, 32), (8, 16)]


def test_only_plain_linear_layers_are_routed(net):
    x = torch.randn(3, 16)
    expected = net(x)
    dictionaries = {name: dict(module.__dict__) for name, module in net.named_modules()}
    done = hf_rocm.route_linear(net, force=True)
    assert repr(done) == "<Routed: 3 linear layers through 'auto', 1 left alone>"
    assert done.layers == ["up", "head.dense", "lm_head"] and "Quantised" in done.skipped["special"]
    output, recorded = routes(net, x)
    assert torch.equal(output, expected) and recorded == [("torch", shape) for shape in ALL]
    for _ in range(2):
        done.undo()
        assert {name: dict(module.__dict__) for name, module in net.named_modules()} == dictionaries
    assert routes(net, x)[1] == []


def test_a_with_block_and_restore_undo_the_routing(net):
    x = torch.randn(3, 16)
    with hf_rocm.route_linear(net, force=True):
        assert len(routes(net, x)[1]) == 3
    assert routes(net, x)[1] == []
    hf_rocm.route_linear(net, force=True)
    hf_rocm.restore(net)
    assert routes(net, x)[1] == []
    assert not [name for m in net.modules() for name in m.__dict__ if "hf_rocm" in name or name == "forward"]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [(["lm_head"], 2), (["head.*"], 2), ([Head], 2), (["*"], 0), (["up", Head, "lm_head"], 0), (["nothing"], 3)],
)
def test_layers_are_excluded_by_name_pattern_and_class(net, exclude, left):
    assert len(hf_rocm.route_linear(net, exclude=exclude, force=True).layers) == left


def test_modules_can_be_excluded_and_invalid_entries_are_refused(net):
    assert hf_rocm.route_linear(net, exclude=[net.head], force=True).skipped["head.dense"] == "excluded"
    with pytest.raises(OptionError, match="invalid entry"):
        hf_rocm.route_linear(net, exclude=[3], force=True)


def test_without_rocm_nothing_happens_and_one_line_is_logged(net, caplog, monkeypatch):
    monkeypatch.setattr(linear_routing, "is_rocm", lambda: False)
    monkeypatch.delenv("HF_ROCM_FORCE", raising=False)
    with caplog.at_level(logging.WARNING, "hf_rocm"):
        assert hf_rocm.route_linear(net).layers == []
    assert len(caplog.records) == 1 and "stays stock" in caplog.text
    assert hf_rocm.route_linear(net, force=False).layers == []
    with pytest.raises(OptionError, match=r"'aiter' is not available"):
        hf_rocm.route_linear(net, linear_backend="aiter")
    assert "forward" not in net.up.__dict__


def test_aiter_runs_and_a_layer_that_it_cannot_serve_is_an_error(net, aiter):
    net = net.to(BF16)
    x = torch.randn(3, 16, dtype=BF16)
    hf_rocm.route_linear(net, linear_backend="aiter", force=True)
    assert {tier for tier, _ in routes(net, x)[1]} == {"aiter"}
    with torch.no_grad(), pytest.raises(TierUnavailable, match="can't serve this call"):
        net.up(x.float())
    hf_rocm.restore(net)
    net.up = nn.Linear(12, 32, dtype=BF16)
    with pytest.raises(TierUnavailable, match="1 of 3 layers") as caught:
        hf_rocm.route_linear(net, linear_backend="aiter", force=True)
    assert caught.value.facts == {"up": "K must be a multiple of 8, got 12"}
    assert "forward" not in net.lm_head.__dict__


@pytest.mark.parametrize("part", ["x", "weight", "bias"])
def test_a_route_without_a_backward_is_not_used_with_gradients(aiter, part):
    linear = nn.Linear(16, 8).to(BF16)
    for parameter in linear.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(3, 16, dtype=BF16)
    for backend in ("auto", "aiter"):
        hf_rocm.route_linear(linear, linear_backend=backend, force=True)
        with ops.recording() as routes:
            linear(x)
        assert [route.tier for route in routes] == ["aiter"]
        requested = {"x": x, "weight": linear.weight, "bias": linear.bias}[part].requires_grad_()
        with ops.recording() as routes:
            linear(x).sum().backward()
        assert [route.tier for route in routes] == ["torch"] and requested.grad is not None
        requested.requires_grad_(False)
        requested.grad = None


def test_autocast_and_function_transforms_use_pytorch(net, aiter):
    net = net.to(BF16)
    hf_rocm.route_linear(net, force=True)
    x = torch.randn(3, 16, dtype=BF16)
    with torch.no_grad(), ops.recording() as routes:
        with torch.autocast("cpu", torch.float16):
            assert net.up(x).dtype == torch.float16
        torch.testing.assert_close(torch.func.vmap(net.up)(x), F.linear(x, net.up.weight))
        with warnings.catch_warnings():
            # PyTorch warns on the first use.
            warnings.simplefilter("ignore", DeprecationWarning)
            _, tangent = torch.func.jvp(net.up, (x,), (x,))
    torch.testing.assert_close(tangent, F.linear(x, net.up.weight))
    assert not routes


def test_hooks_wrappers_and_replaced_parameters_take_effect(net):
    x = torch.randn(3, 16)
    hf_rocm.route_linear(net, force=True)
    handle = net.up.register_forward_hook(lambda module, inputs, output: output + 1)
    assert torch.equal(net.up(x), F.linear(x, net.up.weight) + 1)
    handle.remove()
    net.up.weight = nn.Parameter(torch.zeros(32, 16))
    assert not net.up(x).any()
    called = torch.func.functional_call(net.up, {"weight": torch.ones(32, 16)}, (x,))
    torch.testing.assert_close(called, x.sum(-1, keepdim=True).expand(3, 32))
    own = nn.Linear(16, 8)
    own.forward = lambda x: x
    assert "its own forward" in hf_rocm.route_linear(own, force=True).skipped[""]


def test_replaced_pytorch_functions_are_called(net):
    x = torch.randn(3, 16)
    expected = net(x)
    hf_rocm.route_linear(net, force=True)
    assert len(routes(net, x)[1]) == 3
    for holder, name in ((nn.Linear, "forward"), (F, "linear")):
        with replaced(holder, name, scaled):
            output, recorded = routes(net.up, x)
            assert not recorded
            torch.testing.assert_close(output, F.linear(x, net.up.weight) * (1 if holder is F else 1.25))
    output, recorded = routes(net, x)
    assert len(recorded) == 3
    torch.testing.assert_close(output, expected)


def test_copies_and_pickles_work_here_and_without_hf_rocm(net, tmp_path):
    x = torch.randn(3, 16)
    net = nn.Sequential(net.up, nn.ReLU())
    expected = net(x)
    hf_rocm.route_linear(net, force=True)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x), expected) and len(routes(twin, x)[1]) == 1
    with torch.no_grad():
        twin[0].weight.zero_()
    assert torch.equal(net(x), expected) and not twin(x).any()
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), expected)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    (tmp_path / "net.pt").write_bytes(buffer.getvalue())
    program = (
        "import sys, torch; sys.modules['hf_rocm'] = None\n"
        f"net = torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False)\n"
        "assert net[0].forward.__func__ is torch.nn.Linear.forward\n"
        "print(net(torch.ones(1, 16)).sum().item())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(result.stdout) == pytest.approx(net(torch.ones(1, 16)).sum().item(), rel=1e-5)
    hf_rocm.restore(twin)
    assert "forward" not in twin[0].__dict__


@pytest.mark.parametrize("backend", ["auto", "aiter"])
def test_a_compiled_model_keeps_its_routes(aiter, backend):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)).to(BF16)
    x = torch.randn(3, 16, dtype=BF16)
    expected = net(x)
    hf_rocm.route_linear(net, linear_backend=backend, force=True)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    del recorded.kernels.CALLS[:]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected, rtol=0.02, atol=0.02)
    assert len(recorded.kernels.CALLS) == 2
    compiled(x).sum().backward()
    assert net[0].weight.grad is not None
    torch._dynamo.reset()


def test_nested_routes_restore_the_outer_one(net, aiter):
    net = net.to(BF16)
    outer = hf_rocm.route_linear(net, force=True)
    with hf_rocm.route_linear(net, linear_backend="aiter", exclude=["up"], force=True):
        assert net.lm_head.__dict__["_hf_rocm_linear_backend"] == "aiter"
        assert net.up.__dict__["_hf_rocm_linear_backend"] == "auto"
    assert net.lm_head.__dict__["_hf_rocm_linear_backend"] == "auto"
    outer.undo()
    assert "forward" not in net.up.__dict__


def test_layers_with_accelerates_hook_are_routed(net):
    hooks = pytest.importorskip("accelerate.hooks")
    x = torch.randn(3, 16)
    expected = net(x)
    hooks.add_hook_to_module(net.up, hooks.AlignDevicesHook(execution_device="cpu"))
    stock = net.up.__dict__["_old_forward"]
    with hf_rocm.route_linear(net, force=True):
        output, recorded = routes(net, x)
        assert torch.equal(output, expected) and len(recorded) == 3
    assert routes(net, x)[1] == [] and net.up.__dict__["_old_forward"] == stock
    hf_rocm.route_linear(net.head, force=True)
    hooks.add_hook_to_module(net.head.dense, hooks.AlignDevicesHook(execution_device="cpu"))
    assert len(routes(net, x)[1]) == 1
    hooks.remove_hook_from_module(net.head.dense)
    hf_rocm.restore(net)
    assert routes(net, x)[1] == [] and torch.equal(net(x), expected)


def test_a_layer_that_accelerate_hooked_after_routing_still_runs_without_the_route(net):
    hooks = pytest.importorskip("accelerate.hooks")
    x = torch.randn(3, 16)
    expected = net.up(x)
    routed = hf_rocm.route_linear(net, force=True)
    hooks.add_hook_to_module(net.up, hooks.AlignDevicesHook(execution_device="cpu"))
    routed.undo()
    assert torch.equal(net.up(x), expected) and not is_attached(net.up)
    hooks.remove_hook_from_module(net.up)
    assert torch.equal(net.up(x), expected)


@pytest.mark.parametrize("first", [0, 1])
def test_routes_are_undone_in_any_order_and_leave_nothing(net, first):
    before = {name: dict(module.__dict__) for name, module in net.named_modules()}
    done = [hf_rocm.route_linear(net, force=True) for _ in range(2)]
    done[first].undo()
    assert len(routes(net, torch.randn(3, 16))[1]) == 3
    done[1 - first].undo()
    assert {name: dict(module.__dict__) for name, module in net.named_modules()} == before


def test_undoing_a_restored_route_does_nothing(net):
    before = {name: dict(module.__dict__) for name, module in net.named_modules()}
    done = [hf_rocm.route_linear(net, force=True) for _ in range(2)]
    hf_rocm.restore(net)
    for entry in (*done, *reversed(done)):
        entry.undo()
    assert {name: dict(module.__dict__) for name, module in net.named_modules()} == before


def test_undoing_a_later_route_of_a_copy_restores_the_earlier_one(net):
    hf_rocm.route_linear(net, force=True)
    twin = copy.deepcopy(net)
    with hf_rocm.route_linear(twin, force=True, exclude=["up"]):
        pass
    for model in (net, twin):
        assert len(routes(model, torch.randn(3, 16))[1]) == 3
    hf_rocm.restore(twin)
    assert routes(twin, torch.randn(3, 16))[1] == [] and len(routes(net, torch.randn(3, 16))[1]) == 3


def test_the_global_patch_nests_and_restores_the_previous_function(net):
    x = torch.randn(3, 16)
    expected, stock = net(x), nn.Linear.__dict__["forward"]
    with hf_rocm.routed_linear(force=True):
        outer = nn.Linear.__dict__["forward"]
        output, recorded = routes(net, x)
        assert torch.equal(output, expected) and [shape for _, shape in recorded] == ALL
        with hf_rocm.routed_linear(force=True):
            assert len(routes(net, x)[1]) == 3
        assert nn.Linear.__dict__["forward"] is outer
    assert nn.Linear.__dict__["forward"] is stock and routes(net, x)[1] == []
    with pytest.raises(ZeroDivisionError), hf_rocm.routed_linear(force=True):
        raise ZeroDivisionError
    assert nn.Linear.__dict__["forward"] is stock


def test_global_patches_that_end_in_the_wrong_order_restore_stock(net):
    stock = nn.Linear.__dict__["forward"]
    first, second = hf_rocm.routed_linear(force=True), hf_rocm.routed_linear(force=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert nn.Linear.__dict__["forward"] is stock


def test_another_librarys_patch_stays_and_is_reported(net, caplog):
    x = torch.randn(3, 16)
    stock = nn.Linear.__dict__["forward"]
    try:
        with caplog.at_level(logging.WARNING, "hf_rocm"), hf_rocm.routed_linear(force=True):
            patched = nn.Linear.forward
            nn.Linear.forward = lambda self, input: patched(self, input) + 1
        assert "replaced by other code" in caplog.text
        _, recorded = routes(net, x)
        assert not recorded
        assert torch.equal(net.up(x), F.linear(x, net.up.weight) + 1)
    finally:
        nn.Linear.forward = stock
