"""What the promises are tested on: small sites, wheels of the stock files, real uv and pip."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.overlay.conftest import MODELS, Site, make_site
from tests.overlay.promises.world import NEXT, Environment, make_wheel

THREE = ("bert", "gemma", "llama")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_models" in metafunc.fixturenames:
        everything = os.environ.get("ALL_OVERLAYS") == "1"
        chosen = MODELS if everything else THREE
        metafunc.parametrize("fault_models", [chosen], ids=["+".join(chosen)])


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: fsync is called as ever and costs nothing."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2**26):
        yield tmp_path
        return
    import tempfile

    with tempfile.TemporaryDirectory(dir=shared, prefix="hf-rocm-") as folder:
        yield Path(folder)


@pytest.fixture
def farm(memory: Path) -> Callable[[str], Site]:
    """Sites made of hard links to one original, as uv and conda make them; RECORD lists what is there."""
    original = small_site(memory / "cache")

    def make(name: str) -> Site:
        shutil.copytree(original.path, memory / name, copy_function=os.link)
        return Site(memory / name)

    return make


def small_site(path: Path) -> Site:
    """A site whose RECORD lists its files alone."""
    site = make_site(path)
    record = site.metadata / "RECORD"
    rows = [row for row in record.read_text().splitlines() if (path / row.split(",")[0]).is_file()]
    record.write_text("\n".join(rows) + "\n")
    return site


@pytest.fixture
def environments(tmp_path: Path) -> Callable[..., Environment]:
    """Make environments with stock transformers in them; all share one folder of wheels and one cache."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels)
    make_wheel(wheels, NEXT, note=b"# a newer release\n")

    def make(name: str, tool: str, link_mode: str = "copy") -> Environment:
        environment = Environment(tmp_path / name, wheels, tool, link_mode).create()
        environment.install()
        return environment

    return make
