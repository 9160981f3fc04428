"""Installing hf-rocm next to a ROCm build of PyTorch replaces neither that build nor its Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import Run

pytestmark = pytest.mark.slow

# packages on the default index that break a ROCm build of PyTorch
FORBIDDEN = ("torch", "triton", "pytorch-triton", "pytorch-triton-rocm")

# the two ways in which ROCm builds of PyTorch name their Triton
ROCM_TRITON = {"older": ("pytorch-triton-rocm", "3.5.0"), "newer": ("triton", "3.5.0+rocm7.0.0.gitde6c9b2a")}


@pytest.fixture(scope="module", autouse=True)
def index(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the tests if there is no package index from which pip can resolve requirements."""
    out = tmp_path_factory.mktemp("index")
    if run("-m", "pip", "download", "--quiet", "--no-deps", "--dest", out, "packaging").returncode:
        pytest.skip("not run: needs a package index to resolve against")


def environment(folder: Path, *distributions: tuple[str, str, str]) -> Path:
    """Create a virtual environment with stand-ins for distributions. Returns its Python.

    distributions: (name, version, requirement). An empty requirement means none.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name, version, requirement in distributions:
        module = name.replace("-", "_")
        (site_packages / module).mkdir()
        (site_packages / module / "__init__.py").write_text("raise ImportError('a stand-in')\n")
        information = site_packages / f"{module}-{version}.dist-info"
        information.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}"] if requirement else []
        (information / "METADATA").write_text("\n".join(lines) + "\n")
        (information / "INSTALLER").write_text("pip\n")
        (information / "RECORD").write_text(f"{module}/__init__.py,,\n")
    return folder / "bin" / "python"


def would_install(python: Path, requirement: str, report: Path, *options: str) -> dict[str, str]:
    """Returns name → version of the packages that pip would install.

    Nothing is installed. An empty file overrides the constraints that pip is configured with on this machine.
    """
    unconstrained = report.with_name("no-constraints.txt")
    unconstrained.touch()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--dry-run", *options]
    command = [*pip, "--report", str(report), requirement]
    environ = {**os.environ, "PIP_CONSTRAINT": str(unconstrained)}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    data = (item["metadata"] for item in json.loads(report.read_text())["install"])
    return {metadata["name"].lower(): metadata["version"] for metadata in data}


@pytest.mark.parametrize("naming", ROCM_TRITON)
def test_a_rocm_torch_and_its_triton_are_not_replaced(naming: str, wheel: Path, tmp_path: Path) -> None:
    name, version = ROCM_TRITON[naming]
    torch = ("torch", "2.9.0+rocm7.0", f"{name}=={version}")
    python = environment(tmp_path / "environment", torch, (name, version, ""))
    result = would_install(python, f"hf-rocm[rocm] @ {wheel.as_uri()}", tmp_path / "report.json")
    assert {"hf-rocm", "amd-aiter", "transformers", "accelerate"} <= result.keys()
    assert not result.keys() & set(FORBIDDEN), result
    assert not [name for name in result if name.startswith("nvidia-")], result


def test_pip_would_install_a_missing_torch(wheel: Path, tmp_path: Path) -> None:
    """Proves that the test above can fail: pip reports torch if it would install torch.

    The test provides torch as an empty wheel with a newer version. Otherwise pip would download the index's wheel with
    gigabytes of libraries.
    """
    with zipfile.ZipFile(tmp_path / "torch-99.0-py3-none-any.whl", "w") as archive:
        information = "torch-99.0.dist-info"
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    python = environment(tmp_path / "environment")
    report, options = tmp_path / "report.json", ("--find-links", str(tmp_path))
    assert would_install(python, f"hf-rocm @ {wheel.as_uri()}", report, *options)["torch"] == "99.0"
