"""Doctor's child process on a GPU: it tests GEMMs, attention and the allocator."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.tools.doctor.machine import ThisMachine

pytestmark = pytest.mark.gpu


def test_every_gpu_is_tested() -> None:
    result = ThisMachine().run_task("torch", timeout=240)
    assert result.error is None
    devices = result.facts["devices"]
    assert len(devices) == torch.cuda.device_count() and all(device["gemm"] is None for device in devices)
    assert all("flash" in device and device["free"] <= device["total"] for device in devices)
    allocator = result.facts["allocator"]
    assert allocator["error"] is None and allocator["reserved_after_8"] <= allocator["reserved_after_2"] + 512 * 2**20


@pytest.mark.parametrize("settings", ["expandable_segments:True", "max_split_size_mb:128"])
def test_the_settings_of_the_allocator_take_effect(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    result = ThisMachine().run_task("torch", timeout=240)
    assert result.error is None and result.facts["allocator"]["error"] is None
    # Some ROCm builds ignore the setting, and doctor reports this.
    if torch.version.hip is None:
        assert result.facts["allocator"]["expandable"] is ("expandable" in settings)
