"""Fixtures for the promises: small sites, wheels of the stock files, and the real uv and pip."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.overlay.conftest import MODELS, Site, make_site
from tests.overlay.promises.world import NEXT, Environment, make_wheel

THREE = ("bert", "gemma", "llama")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_models" in metafunc.fixturenames:
        everything = os.environ.get("ALL_OVERLAYS") == "1"
        chosen = MODELS if everything else THREE
        metafunc.parametrize("fault_models", [chosen], ids=["+".join(chosen)], scope="module")


@contextmanager
def in_memory(folder: Path) -> Iterator[Path]:
    """Use a folder in memory if possible: fsync is called as usual and costs nothing."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2**26):
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=shared, prefix="hf-rocm-") as path:
        yield Path(path)


def make_farm(folder: Path) -> Callable[[str], Site]:
    """Return a function that creates sites whose files are hard links to one original, as uv and conda do."""
    original = make_site(folder / "cache")

    def make(name: str) -> Site:
        shutil.copytree(original.path, folder / name, copy_function=os.link)
        return Site(folder / name)

    return make


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture
def farm(memory: Path) -> Callable[[str], Site]:
    return make_farm(memory)


@pytest.fixture
def environments(tmp_path: Path) -> Callable[..., Environment]:
    """Return a function that creates environments with stock transformers, which share one folder of wheels and one
    cache."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels)
    make_wheel(wheels, NEXT, note=b"# a newer release\n")

    def make(name: str, tool: str, link_mode: str = "copy") -> Environment:
        environment = Environment(tmp_path / name, wheels, tool, link_mode).create()
        environment.install()
        return environment

    return make
