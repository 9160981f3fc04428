"""amd-aiter from PyPI, with stand-ins for its compiled kernels, on a simulated MI300X."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest

from tests.aiter import standins

ARCH = "gfx942"


def aiter_version() -> str | None:
    try:
        return version("amd-aiter")
    except PackageNotFoundError:
        return None


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Install the stand-ins for this process and its children."""
    if aiter_version() is None:
        pytest.skip("not run: needs amd-aiter (scripts/test installs it)")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in standins.environment(tmp_path_factory.mktemp("rocm-tools")).items():
            patch.setenv(name, value)
        standins.install()
        with warnings.catch_warnings():
            # Importing aiter emits warnings.
            warnings.simplefilter("ignore")
            from hf_rocm.ops import probe_worker
            from hf_rocm.ops.aiter import detect

            loaded = detect.load()
            assert not isinstance(loaded, str), loaded
        yield standins.load_kernels()
        probe_worker.stop()
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, standins.Finder)]


@pytest.fixture
def mi300x(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Treat CPU tensors as tensors of an MI300X, and clear the caches of other tests."""
    from hf_rocm.ops import probe, registry
    from tests.aiter.machine import pretend

    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    pretend(monkeypatch, ARCH)
    probe.forget()
    yield
    probe.forget()
    registry.forget_choices()


@pytest.fixture
def break_kernel(kernels: ModuleType) -> Iterator[Callable[[str], None]]:
    """Return a function that breaks one kernel in this process and its children. Its argument is `name:fault`."""
    file = Path(os.environ["STANDIN_BROKEN"])

    def write(fault: str) -> None:
        file.write_text(fault)

    yield write
    file.write_text("")


@pytest.fixture
def recorded_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that simulates a GPU and a release of aiter. It uses recorded declarations, not amd-aiter."""
    from hf_rocm.ops.aiter import detect
    from tests.aiter import recorded
    from tests.aiter.machine import pretend

    def use(version: str, arch: str = ARCH) -> None:
        release = recorded.release(version)
        monkeypatch.setattr(detect, "load", lambda: release)
        pretend(monkeypatch, arch)
        del standins.load_kernels().CALLS[:]

    return use
