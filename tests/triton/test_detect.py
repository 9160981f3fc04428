"""Whether Triton can serve a device, the reason if it can't, and the behaviour of the tier without Triton."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.ops import probe, probe_worker
from hf_rocm.ops.triton import detect
from tests.triton.routed import random

CPU, MI300X, H200 = Device("cpu", rocm=False), Device("cuda", rocm=True, arch="gfx942"), Device("cuda", rocm=False)


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setattr(options, "triton_interprets", lambda: False)


@pytest.fixture
def fresh():
    detect.load.cache_clear()
    yield
    detect.load.cache_clear()


def importing(version="3.6.0", drivers=()):
    modules = {
        "triton": SimpleNamespace(__version__=version),
        "triton.backends": SimpleNamespace(
            backends={
                name: SimpleNamespace(driver=SimpleNamespace(is_active=lambda name=name: name in drivers))
                for name in ("amd", "nvidia")
            }
        ),
    }
    return lambda name: modules[name]


def test_the_interpreter_serves_the_cpu():
    assert detect.unavailable(CPU) is None
    assert "this device is of type mps" in detect.unavailable(Device("mps", rocm=False))


def test_without_the_interpreter_the_cpu_is_refused_and_triton_is_not_imported(compiling, fresh, monkeypatch):
    monkeypatch.setattr(detect.importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    assert "TRITON_INTERPRET=1" in detect.unavailable(CPU)


@pytest.mark.parametrize(
    ("device", "drivers", "reason"),
    [
        (MI300X, {"amd"}, None),
        (H200, {"nvidia"}, None),
        (MI300X, {"nvidia"}, "finds no AMD GPU"),
        (H200, set(), "finds no NVIDIA GPU"),
    ],
)
def test_triton_must_have_a_driver_for_the_gpu(device, drivers, reason, compiling, fresh, monkeypatch):
    monkeypatch.setattr(detect.importlib, "import_module", importing(drivers=drivers))
    answer = detect.unavailable(device)
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize(
    ("version", "reason"), [("2.1.0", "need Triton 3.2 or newer"), ("odd", "can't be read"), ("3.2.0+git1", None)]
)
def test_tritons_version_is_checked(version, reason, compiling, fresh, monkeypatch):
    monkeypatch.setattr(detect.importlib, "import_module", importing(version, {"amd"}))
    answer = detect.unavailable(MI300X)
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "not installed"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "No module named 'x'"),
        (RuntimeError("no compiler\nat all"), "RuntimeError: no compiler"),
    ],
    ids=["absent", "a part absent", "broken"],
)
def test_a_failed_import_is_the_reason(error, reason, compiling, fresh, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(detect.importlib, "import_module", fail)
    answer = detect.unavailable(MI300X)
    assert reason in answer and "\n" not in answer


@pytest.mark.slow
def test_a_kernel_is_checked_in_a_child_before_its_first_use(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    probe.forget()
    x, weight = random(2, 24, dtype=torch.bfloat16), random(24, dtype=torch.bfloat16, seed=1)
    requests = []
    monkeypatch.setattr(probe_worker, "send", _recording(requests))
    try:
        with options.override(tier="triton", probe=True):
            ops.rms_norm(x, weight, eps=1e-6)
            ops.rms_norm(x, weight, eps=1e-6)
        assert [(request["tier"], request["name"]) for request in requests] == [("triton", "rms_norm_kernel")]
        assert len(list(tmp_path.rglob("*.json"))) == 1
    finally:
        probe.forget()
        probe_worker.stop()


def _recording(requested):
    send = probe_worker.send

    def recorded(request, timeout):
        requested.append(request)
        return send(request, timeout)

    return recorded
