"""From the second launch on, a compiled kernel is launched directly, but only if Triton would select the same one."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from hf_rocm import options
from hf_rocm.device import Device
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import launch as launching
from hf_rocm.ops.triton.launch import form, forms_of, forms_of_strides, lanes, launch, power_of_two, warps


class Kernel:
    """A stand-in for a jit function that records compilations and launches."""

    def __init__(self):
        self.compiled, self.launched, self.calls = [], [], []

    def __getitem__(self, grid):
        def run(*arguments, **keywords):
            self.compiled.append((grid, arguments, keywords))
            return Compiled(self, len(self.compiled))

        return run


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.calls.append((self.number, grid, arguments))

    def run(self, x, y, z, stream, function, metadata, info, enter, leave, *arguments):
        assert (stream, function, metadata) == ("stream of -1", "function", "metadata")
        assert info is enter is leave is None
        self.kernel.launched.append((self.number, (x, y, z), arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_caches_kernels", lambda: True)
    monkeypatch.setattr(launching, "_compiled", {})
    driver = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(launching, "_driver", lambda: driver)
    return Kernel()


def test_the_second_launch_is_direct(kernel):
    x = torch.zeros(32)
    for _ in range(3):
        launch(kernel, (4,), (x, None, 7, 0.5), {"DIM": 32, "PLUS": True}, num_warps=4)
    assert kernel.compiled == [((4,), (x, None, 7, 0.5), {"DIM": 32, "PLUS": True, "num_warps": 4})]
    # arguments are in the order of the signature and include constants, as in Triton's own launch
    assert kernel.launched == [(1, (4, 1, 1), (x, None, 7, 0.5, 32, True))] * 2


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (7, 9, True),
        (7, 1, False),
        (7, 16, False),
        (16, 32, True),
        (16, 2**31, False),
        (0.5, 0.25, True),
        (None, 7, False),
        (torch.zeros(32), torch.ones(64), True),
        (torch.zeros(32), torch.zeros(33)[1:], False),
        (torch.zeros(32), torch.zeros(32).half(), False),
    ],
    ids=lambda value: "tensor" if isinstance(value, torch.Tensor) else str(value),
)
def test_a_kernel_is_recompiled_if_triton_would_recompile_it(kernel, first, second, same):
    x = torch.zeros(16)
    for entry in (first, second):
        launch(kernel, (1,), (x, entry), {}, num_warps=4)
    assert len(kernel.compiled) == (1 if same else 2)


def test_a_profiler_is_notified(kernel, monkeypatch):
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[1]), launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(launching, "_runtime", lambda: hooks)
    x = torch.zeros(32)
    for _ in range(2):
        launch(kernel, (4, 2), (x,), {"DIM": 32}, num_warps=4)
    assert kernel.calls == [(1, (4, 2, 1), (x, 32))] and not kernel.launched


def test_the_cache_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_MAX_KERNELS", 2)
    for dim in (1, 2, 3):
        launch(kernel, (1,), (torch.zeros(16),), {"DIM": dim}, num_warps=4)
    assert len(launching._compiled) == 1


def test_rounding_can_be_preserved(kernel):
    x = torch.zeros(16)
    launch(kernel, (1,), (x,), {}, num_warps=4)
    launch(kernel, (1,), (x,), {}, num_warps=4, contract=False, num_stages=3)
    assert [keywords for _, _, keywords in kernel.compiled] == [
        {"num_warps": 4},
        {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False},
    ]


def test_the_key_of_aligned_tensors_consists_of_their_dtypes(monkeypatch):
    x, odd = torch.zeros(16), torch.zeros(17)[1:]
    assert forms_of(x, None, x.half()) == (torch.float32, None, torch.float16)
    assert forms_of(x, odd, None) == (form(x), form(odd), form(None)) != (form(x), form(x), form(None))
    monkeypatch.setattr(launching, "is_rocm", lambda: True)
    assert forms_of(x, x) == (form(x), form(x))


@pytest.mark.parametrize(("constants", "num_warps"), [({"DIM": 2}, 4), ({"DIM": 1}, 8)])
def test_a_kernel_is_recompiled_for_other_constants(kernel, constants, num_warps):
    launch(kernel, (1,), (torch.zeros(16),), {"DIM": 1}, num_warps=4)
    launch(kernel, (1,), (torch.zeros(16),), constants, num_warps=num_warps)
    assert len(kernel.compiled) == 2


def test_amds_compiler_specialises_on_the_size_of_the_storage(kernel, monkeypatch):
    monkeypatch.setattr(launching, "is_rocm", lambda: True)
    x = torch.zeros(16)
    launch(kernel, (1,), (x,), {}, num_warps=4)
    monkeypatch.setattr(launching, "_LARGEST_INT", 8)
    launch(kernel, (1,), (x,), {}, num_warps=4)
    assert len(kernel.compiled) == 2


def test_the_rules_match_the_installed_triton():
    """Before a release is added to `KNOWN_RULES`, check how it specialises kernels. Other releases are skipped."""
    from triton.backends import compiler
    from triton.backends.amd.compiler import HIPBackend
    from triton.compiler import CompiledKernel

    if detect.release().version.release[:2] not in launching.KNOWN_RULES:
        pytest.skip("not run: this release of Triton is unknown, so Triton launches all kernels")
    integers = inspect.getsource(compiler.BaseBackend.get_int_specialization)
    tensors = inspect.getsource(compiler.BaseBackend.get_tensor_specialization)
    assert "arg % 16 == 0" in integers and "data_ptr() % 16 == 0" in tensors
    assert "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata" in inspect.getsource(
        CompiledKernel.__getitem__
    )
    assert "is_within_2gb" in inspect.getsource(HIPBackend.get_tensor_specialization)


def test_kernels_are_not_cached_with_an_unknown_triton_or_the_interpreter(monkeypatch):
    launching._caches_kernels.cache_clear()
    assert not launching._caches_kernels()
    monkeypatch.setattr(options, "triton_interprets", lambda: False)
    for version, remembers in (("3.6.0", True), ("3.7.1", False)):
        launching._caches_kernels.cache_clear()
        monkeypatch.setattr(
            detect, "release", lambda version=version: detect.Release(detect.Version(version), frozenset())
        )
        assert launching._caches_kernels() is remembers
    launching._caches_kernels.cache_clear()


def test_warps_follow_from_threads(monkeypatch):
    device = torch.device("cpu")
    for arch, wide in (("gfx942", 64), ("gfx90a", 64), ("gfx1100", 32), ("gfx1201", 32), (None, 32)):
        lanes.cache_clear()
        monkeypatch.setattr(launching, "describe", lambda device, arch=arch: Device("cuda", rocm=True, arch=arch))
        assert lanes(device) == wide and warps(256, device) == 256 // wide and warps(32, device) == 1
    lanes.cache_clear()


def test_sizes_are_rounded_up_to_powers_of_two():
    assert [power_of_two(size) for size in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_strides_that_triton_specialises_differently_have_different_forms():
    usual = forms_of_strides((4096, 128, 1024, 65536, 0, 16))
    assert usual == forms_of_strides((131072, 256, 16, 32, 48, 64))
    others = [(4096, 1, 1024), (4096, 120, 1024), (4096, 128, 2**31), (1, 128, 4096)]
    assert len({usual, *map(forms_of_strides, others)}) == 5
