"""What the helpers say of a machine: on this one, and on a ROCm build that is pretended."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hf_rocm
from hf_rocm import device


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A ROCm torch with an MI300X and a Radeon; returns which devices were asked about."""
    asked: list[object] = []
    names = {0: "gfx942:sramecc+:xnack-", 1: "gfx1100"}

    def properties(which: torch.device) -> SimpleNamespace:
        asked.append(which.index)
        return SimpleNamespace(gcnArchName=names[which.index])

    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device.describe.cache_clear()
    yield asked  # type: ignore[misc]
    device.describe.cache_clear()


def test_here_they_say_what_torch_says() -> None:
    assert hf_rocm.is_rocm() is (torch.version.hip is not None)
    assert hf_rocm.gpu_available() is torch.cuda.is_available()
    if not hf_rocm.is_rocm():
        assert hf_rocm.gpu_arch() is hf_rocm.gpu_arch("cpu") is hf_rocm.gpu_arch(0) is None


def test_the_architecture_comes_without_flags_and_follows_the_current_device(rocm: list[object]) -> None:
    assert hf_rocm.is_rocm() and hf_rocm.gpu_available()
    assert (hf_rocm.gpu_arch(0), hf_rocm.gpu_arch("cuda:0"), hf_rocm.gpu_arch(torch.device("cuda", 0))) == (
        "gfx942",
    ) * 3
    assert hf_rocm.gpu_arch() == hf_rocm.gpu_arch("cuda") == hf_rocm.gpu_arch(1) == "gfx1100"
    assert hf_rocm.gpu_arch("cpu") is None
    assert rocm == [0, 1]  # each device is opened once


def test_a_rocm_build_that_sees_no_gpu_has_no_architecture(rocm: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not hf_rocm.gpu_available() and hf_rocm.gpu_arch() is None and rocm == []


def test_asking_whether_it_is_rocm_opens_nothing_and_needs_no_pynvml() -> None:
    program = (
        "import sys, hf_rocm; assert 'torch' not in sys.modules; hf_rocm.is_rocm(); hf_rocm.gpu_available();"
        "import torch; print(torch.cuda.is_initialized(), 'pynvml' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
