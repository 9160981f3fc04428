"""The device helpers on this machine, and on a simulated ROCm build."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import hf_rocm
from hf_rocm import device
from hf_rocm.architectures import least_of_cards


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Simulate a ROCm torch with an MI300X and a Radeon. Returns the list of queried device indices."""
    requested: list[object] = []
    names = {0: "gfx942:sramecc+:xnack-", 1: "gfx1100"}

    def properties(gpu: torch.device) -> SimpleNamespace:
        requested.append(gpu.index)
        return SimpleNamespace(gcnArchName=names[gpu.index])

    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device.describe.cache_clear()
    yield requested  # type: ignore[misc]
    device.describe.cache_clear()


def test_on_this_machine_the_helpers_agree_with_torch() -> None:
    assert hf_rocm.is_rocm() is (torch.version.hip is not None)
    assert hf_rocm.gpu_available() is torch.cuda.is_available()
    if not hf_rocm.is_rocm():
        assert hf_rocm.gpu_arch() is hf_rocm.gpu_arch("cpu") is hf_rocm.gpu_arch(0) is None


def test_the_architecture_has_no_flags_and_is_that_of_the_current_device(rocm: list[object]) -> None:
    assert hf_rocm.is_rocm() and hf_rocm.gpu_available()
    assert (hf_rocm.gpu_arch(0), hf_rocm.gpu_arch("cuda:0"), hf_rocm.gpu_arch(torch.device("cuda", 0))) == (
        "gfx942",
    ) * 3
    assert hf_rocm.gpu_arch() == hf_rocm.gpu_arch("cuda") == hf_rocm.gpu_arch(1) == "gfx1100"
    assert hf_rocm.gpu_arch("cpu") is None
    # Every device is queried only once.
    assert rocm == [0, 1]


def test_a_rocm_build_without_a_gpu_has_no_architecture(rocm: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not hf_rocm.gpu_available() and hf_rocm.gpu_arch() is None and rocm == []


def test_is_rocm_opens_no_device_and_needs_no_pynvml() -> None:
    program = (
        "import sys, hf_rocm; assert 'torch' not in sys.modules; hf_rocm.is_rocm(); hf_rocm.gpu_available();"
        "import torch; print(torch.cuda.is_initialized(), 'pynvml' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False", "False"]


GIB = 2**30


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that simulates a GPU and a host with given amounts of memory (GiB)."""

    def simulate(
        arch: str, flag: int | None, *, total: float, free: float, host: float, available: float, carved: float
    ) -> None:
        flags = {} if flag is None else {"is_integrated": flag}
        properties = SimpleNamespace(gcnArchName=arch, total_memory=int(total * GIB), **flags)
        monkeypatch.setattr(torch.version, "hip", "7.13")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (int(free * GIB), int(total * GIB)))
        monkeypatch.setattr(device, "available", lambda: int(available * GIB))
        monkeypatch.setattr(device, "_host_memory", lambda: int(host * GIB))
        monkeypatch.setattr(device, "_carved_out", lambda: int(carved * GIB))
        device.describe.cache_clear()

    yield simulate  # type: ignore[misc]
    device.describe.cache_clear()


# sources of the first three machines: https://github.com/ROCm/legacy-rocm-build/issues/6004 (2026-08-09),
# https://github.com/vllm-project/vllm/pull/54776, https://github.com/pytorch/pytorch/issues/107605 (2026-04-27)
@pytest.mark.parametrize(
    ("machine", "total", "free"),
    [
        ({"total": 62.47, "free": 120, "host": 124.92, "available": 120, "carved": 0.5}, 62.47, 62.47),
        ({"total": 94.19, "free": 94, "host": 124.92, "available": 30, "carved": 0.5}, 94.19, 30.5),
        ({"total": 15.49, "free": 95.84, "host": 96, "available": 90, "carved": 15.49}, 15.49, 15.49),
        ({"total": 135, "free": 134, "host": 32, "available": 30, "carved": 96}, 128, 126),
    ],
)
@pytest.mark.parametrize(("arch", "flag"), [("gfx1151", None), ("gfx1150", 1), ("gfx942", 1)])
def test_a_gpu_that_shares_the_hosts_memory_is_limited_by_it(
    shared: Callable[..., None], arch: str, flag: int | None, machine: dict[str, float], total: float, free: float
) -> None:
    shared(arch, flag, **machine)
    gpu = torch.device("cuda", 0)
    assert device.describe(gpu).integrated
    assert device.total_memory(gpu) == pytest.approx(total * GIB, abs=2)
    assert device.free_memory(gpu) == pytest.approx(free * GIB, abs=2)


def test_a_card_with_dedicated_memory_is_not_limited_by_the_host(shared: Callable[..., None]) -> None:
    shared("gfx1200", 0, total=16, free=15, host=8, available=4, carved=0)
    gpu = torch.device("cuda", 0)
    assert (device.total_memory(gpu), device.free_memory(gpu)) == (16 * GIB, 15 * GIB)


def test_the_hosts_memory_is_read_from_linux() -> None:
    assert 0 < device.available() <= device.total_memory(torch.device("cpu"))


def test_the_integrated_gpu_has_the_least_dedicated_memory() -> None:
    assert least_of_cards(["25753026560\n", "536870912\n", None, "junk"]) == 536870912
    assert least_of_cards([]) == least_of_cards([None]) == 0
