"""The child process that checks kernels is started while a model loads, if it will be needed. Its imports are cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import hf_rocm
from hf_rocm import options
from hf_rocm.ops import probe, probe_child, probe_worker, registry
from hf_rocm.ops.specs.pointwise import NormSpec
from tests.generation.conftest import make


@pytest.fixture
def started(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(probe_worker, "start", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    return calls


def test_the_child_starts_if_nothing_was_checked_yet(started):
    probe.ahead()
    probe.ahead(torch.device("cpu"))
    probe.ahead(torch.device("cuda", 1))
    assert started == [None, None, torch.device("cuda", 1)]


def test_the_child_does_not_start_if_a_check_has_passed(started, tmp_path):
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "0.json").write_text("{}")
    probe.ahead()
    assert not started
    with options.override(refresh=True):
        probe.ahead()
    assert started


def test_the_child_does_not_start_without_a_gpu_or_without_checks(started, monkeypatch):
    with options.override(probe=False):
        probe.ahead()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    probe.ahead()
    assert not started


def test_starting_is_idempotent(monkeypatch):
    created = []

    class Worker:
        def __init__(self, *, warm):
            created.append(warm)

        def alive(self):
            return True

    monkeypatch.setattr(probe_worker, "_worker", None)
    monkeypatch.setattr(probe_worker, "_Worker", Worker)
    probe_worker.start()
    probe_worker.start()
    assert created == [True]


def request():
    kind = NormSpec(
        dtype=torch.float32,
        weight_dtype=torch.float32,
        device=torch.device("cpu"),
        dim=64,
        one_plus=False,
        grad=False,
    )
    return probe_worker.request("rms_norm", "torch", "F.rms_norm", kind)


def test_the_child_warms_up_once_per_device_and_then_runs_checks():
    worker = probe_worker._Worker(warm=True)
    sent = []
    worker._send = lambda request, send=worker._send: sent.append(request) or send(request)
    try:
        # These devices do not exist; the child ignores the errors.
        for device in ("cuda:97", "cuda:97", "cuda:96"):
            worker.wake(torch.device(device))
        assert sent == [{"wake": "cuda:97"}, {"wake": "cuda:96"}]
        assert worker.send(request(), 60.0) == {"reason": None}
    finally:
        worker.kill()


def test_warming_up_uses_the_device(monkeypatch):
    devices = []
    monkeypatch.setattr(torch, "mm", lambda *args: devices.append(args[0].device) or args[0])
    probe_child._wake_on("cpu")
    assert devices == [torch.device("cpu")]


@pytest.mark.parametrize("ending", ["os.abort", "lambda: time.sleep(60)"])
def test_a_child_that_dies_or_hangs_in_its_warm_up_disables_no_kernel(ending, monkeypatch):
    """The process that replaces the child does not warm up before its first request."""
    code = "from hf_rocm.ops import probe_child as w; import os, time; w.WAKING = 1; "
    start = probe_worker._START.replace(
        "from hf_rocm.ops.probe_child import serve; serve(", f"{code}w._wake = {ending}; w.serve("
    )
    monkeypatch.setattr(probe_worker, "_START", start)
    monkeypatch.setattr(probe_worker, "_worker", None)
    probe_worker.start()
    first = probe_worker._worker.process
    try:
        assert probe_worker.send(request(), 60.0) is None
        assert probe_worker._worker.process is not first and first.returncode in (-6, -14)
    finally:
        probe_worker.stop()


def test_prepare_starts_the_child_unless_the_model_stays_stock(started):
    hf_rocm.prepare(make("llama"), force=False)
    assert not started
    hf_rocm.prepare(make("llama"), force=True)
    assert started


def test_prepare_raises_no_error_if_the_process_cannot_be_started(started, monkeypatch):
    """A later first-use check reports the error."""

    def start(device):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(probe_worker, "start", start)
    hf_rocm.prepare(make("llama"), force=True)


def test_the_operations_are_imported_without_the_compiler():
    """Importing the compiler takes seconds, both in this process and in the child."""
    code = "import hf_rocm.ops, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_constants_are_still_marked_for_the_compiler():
    def function():
        """Nothing."""

    assert vars(torch.compiler.assume_constant_result(function)) == {"_dynamo_marked_constant": True}
    assert registry._index_of_choice._dynamo_marked_constant
