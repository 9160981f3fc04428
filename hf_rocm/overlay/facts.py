"""The torch, ROCm and aiter of this environment, read from files without importing them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROCM_VERSION = Path("/opt/rocm/.info/version")
ROCM_DEVICE = Path("/dev/kfd")


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch. hip: the HIP version that it was built for, or None. rocm: the ROCm version,
    which builds since 2.10 also record."""

    path: str | None = None
    version: str | None = None
    hip: str | None = None
    cuda: str | None = None
    rocm: str | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class RocmFacts:
    """The ROCm user space of this machine, and whether the kernel driver provides a device."""

    version: str | None
    device: bool

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class AiterFacts:
    """The package that `import aiter` would import: AMD's (`amd-aiter` on PyPI), or an unrelated one with this name."""

    path: str | None = None
    amd: bool = False
    version: str | None = None

    @property
    def sentence(self) -> str:
        if self.path is None:
            return "not installed"
        if self.amd:
            return f"amd-aiter {self.version or '(version unknown)'}"
        return (
            f"the unrelated PyPI package `aiter` {self.version or '(version unknown)'} is installed instead of AMD's; "
            "run `pip uninstall aiter`, then `pip install amd-aiter`"
        )

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "sentence": self.sentence}


def torch_facts() -> TorchFacts:
    folder = _package("torch")
    if folder is None:
        return TorchFacts()
    values = _string_constants(folder / "version.py")
    return TorchFacts(str(folder), *(values.get(name) for name in ("__version__", "hip", "cuda", "rocm")))


def rocm_facts() -> RocmFacts:
    version = ROCM_VERSION.read_text(encoding="utf-8").strip() if ROCM_VERSION.is_file() else None
    return RocmFacts(version, ROCM_DEVICE.exists())


def aiter_facts() -> AiterFacts:
    folder = _package("aiter")
    if folder is None:
        return AiterFacts()
    amd = (folder / "jit" / "core.py").is_file() and (folder / "ops" / "mha.py").is_file()
    return AiterFacts(str(folder), amd, _distribution_version("amd-aiter" if amd else "aiter"))


def _package(name: str) -> Path | None:
    """The folder of a top-level package, located without importing it; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        # sys.modules contains a stand-in without a spec.
        file = getattr(sys.modules.get(name), "__file__", None)
        return Path(file).parent if file else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _string_constants(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    constants = {}
    for statement in ast.parse(file.read_bytes()).body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return constants


def _distribution_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
