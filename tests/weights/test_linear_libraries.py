"""route_linear with a library sets PyTorch's preferred library while a routed layer runs, and restores it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.errors import OptionError
from hf_rocm.ops import blas_backend


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert nn.Linear.__dict__["forward"].__module__ == "torch.nn.modules.linear"
    yield
    assert nn.Linear.__dict__["forward"].__module__ == "torch.nn.modules.linear"


class Net(nn.Module):
    """A model without an overlay."""

    def __init__(self):
        super().__init__()
        self.up, self.between, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.between(torch.relu(self.up(x))))


@pytest.fixture
def net():
    return Net().eval()


@pytest.fixture
def switch(monkeypatch):
    """Simulate PyTorch's setting on a machine with all libraries. Returns (the requests, the current library)."""
    names = {"default": "Default", "cublas": "Cublas", "hipblas": "Cublas", "cublaslt": "Cublaslt", "ck": "Ck"}
    requests, current = [], ["Default"]

    def preferred(backend=None):
        if backend is not None:
            requests.append(backend)
            current[0] = names.get(backend, backend)
        return current[0]

    monkeypatch.setattr(torch.backends.cuda, "_BlasBackends", names)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    monkeypatch.setattr(blas_backend, "is_rocm", lambda: True)
    return requests, current


@pytest.mark.parametrize(("backend", "name"), [("hipblaslt", "cublaslt"), ("rocblas", "hipblas"), ("ck", "ck")])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_library_is_preferred_while_a_routed_layer_runs(net, switch, backend, name, compiled):
    requested, current = switch
    x = torch.randn(3, 16)
    expected = net(x)
    hf_rocm.route_linear(net, linear_backend=backend, force=True)
    del requested[:]
    torch._dynamo.reset()
    model = torch.compile(net, backend="eager") if compiled else net
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert requested == [name, "Default"] * 3 and current == ["Default"]
    torch._dynamo.reset()


def test_a_library_serves_fused_groups_too(switch):
    from hf_rocm.layers.grouped_linear import product
    from hf_rocm.weights.fuse import fuse

    module = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}).requires_grad_(False)
    x = torch.randn(3, 16)
    expected = torch.cat([module["a"](x), module["b"](x)], dim=-1)
    assert fuse(module, ("a", "b")) is None
    hf_rocm.route_linear(module, linear_backend="rocblas", force=True)
    del switch[0][:]
    torch.testing.assert_close(product(module, x), expected)
    assert switch[0] == ["hipblas", "Default"]


def test_an_unavailable_library_is_an_error(net, switch, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "_BlasBackends", {"cublas": "Cublas"})
    with pytest.raises(OptionError, match=r"(?s)'ck' can't be honoured.*only cublas"):
        hf_rocm.route_linear(net, linear_backend="ck", force=True)
    monkeypatch.setattr(torch.backends.cuda, "_BlasBackends", {"cublas": "Cublas", "hipblaslt": "Cublaslt"})
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda backend=None: "Cublas")
    with pytest.raises(OptionError, match=r"(?s)'hipblaslt'.*PyTorch chose Cublas"):
        hf_rocm.route_linear(net, linear_backend="hipblaslt", force=True)
    monkeypatch.setattr(blas_backend, "is_rocm", lambda: False)
    with pytest.raises(OptionError, match="not a ROCm build"), hf_rocm.routed_linear(linear_backend="ck", force=True):
        pass
    with pytest.raises(OptionError, match="is not valid"):
        hf_rocm.route_linear(net, linear_backend="cutlass", force=True)
    assert "forward" not in net.up.__dict__


def test_the_installed_pytorch_has_every_library_name():
    """The setting of the installed PyTorch has a name for every library that hf_rocm accepts."""
    assert all(blas_backend._name(entry) for entry in blas_backend.LIBRARIES)
