"""Writable copies of the installed transformers. The installed files are only read."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.locate import Installation, locate

# A site contains only these models. Every release has them, and the tested code treats all models in the same way.
MODELS = ("bert", "gemma", "llama", "qwen3")


@dataclass(frozen=True)
class Site:
    """A directory like site-packages that contains transformers."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path / "transformers"

    @property
    def installation(self) -> Installation:
        return locate(self.path)

    @property
    def metadata(self) -> Path:
        return next(self.path.glob("transformers-*.dist-info"))

    def model(self, name: str) -> Path:
        return self.root / "models" / name / f"modeling_{name}.py"

    def set_release(self, version: str) -> None:
        """Change the release as a package manager does, without changing any model."""
        file = self.root / "__init__.py"
        file.write_text(file.read_text().replace(self.installation.version, version))
        self.metadata.rename(self.metadata.with_name(f"transformers-{version}.dist-info"))

    def forget_record(self) -> None:
        """Remove RECORD, as if the package manager had recorded no hashes."""
        (self.metadata / "RECORD").unlink()


def installed_package() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def hashes(folder: Path) -> dict[str, tuple[str, int]]:
    """Content hash and mode of every file and folder below a folder, except bytecode, which imports write."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder",
            stat.S_IMODE(path.lstat().st_mode),
        )
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def fingerprint(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and modification time of every file and folder. A run that writes nothing changes none of them."""
    results = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        results[path.relative_to(folder).as_posix()] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return results


def next_release(version: str) -> str:
    """An unknown release that the same overlays cover."""
    return ".".join([*version.split(".")[:2], "99"])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A copy of the installed transformers with only the files that the overlays of MODELS need."""
    return make_site(tmp_path / "site")


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Site]:
    return lambda name: make_site(tmp_path / name)


def make_site(path: Path) -> Site:
    shutil.copytree(Path(_template().name) / "site", path)
    return Site(path)


@cache
def _template() -> tempfile.TemporaryDirectory[str]:
    """The template from which every site is copied. It is built once, with the files that the catalog names."""
    folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="hf-rocm-site-")
    # a site has the default mode, so it is a subfolder of the temporary folder, whose mode is private
    path, source = Path(folder.name) / "site", installed_package()
    (path / "transformers" / "models").mkdir(parents=True)
    shutil.copy2(source / "__init__.py", path / "transformers" / "__init__.py")
    for model in MODELS:
        shutil.copytree(
            source / "models" / model,
            path / "transformers" / "models" / model,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    metadata = next(source.parent.glob("transformers-*.dist-info"))
    shutil.copytree(metadata, path / metadata.name)
    site = Site(path)
    for overlay in catalogs.load().for_release(site.installation.version):
        for module in {name.partition(":")[0] for name in overlay.record.names} if overlay.model in MODELS else ():
            _copy_module(module, source.parent, path)
    record = site.metadata / "RECORD"
    rows = [row for row in record.read_text().splitlines() if (path / row.split(",")[0]).is_file()]
    record.write_text("\n".join(rows) + "\n")
    return folder


def _copy_module(module: str, source: Path, target: Path) -> None:
    stem = Path(*module.split("."))
    for file in (stem / "__init__.py", stem.with_suffix(".py")):
        if (source / file).is_file() and not (target / file).exists():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / file, target / file)


@pytest.fixture(scope="session")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One copy of the whole installed transformers. Tests must undo their changes to it."""
    path = tmp_path_factory.mktemp("whole")
    source = installed_package()
    # ignore the temporary files of modules that another process compiles
    shutil.copytree(source, path / "transformers", ignore=shutil.ignore_patterns("*.pyc.*"))
    metadata = next(source.parent.glob("transformers-*.dist-info"))
    shutil.copytree(metadata, path / metadata.name)
    yield Site(path)
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return catalogs.load()
