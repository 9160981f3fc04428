"""Real environments, created offline by the real uv and pip from wheels with the stock files of a few models."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.overlay.conftest import MODELS, Site, installed_package

VERSION = next(installed_package().parent.glob("transformers-*.dist-info")).name.split("-")[1].removesuffix(".dist")
NEXT = ".".join([*VERSION.split(".")[:2], "98"])


def make_wheel(folder: Path, version: str = VERSION, *, note: bytes = b"") -> Path:
    """Build a wheel named transformers with the stock files of `MODELS`. note: appended to every modeling file."""
    source = installed_package()
    old = (source / "__init__.py").read_bytes()
    files = {"transformers/__init__.py": old.replace(VERSION.encode(), version.encode())}
    files["transformers/models/__init__.py"] = (source / "models" / "__init__.py").read_bytes()
    for model in MODELS:
        for file in sorted((source / "models" / model).glob("*.py")):
            data = file.read_bytes() + (note if file.name == f"modeling_{model}.py" else b"")
            files[f"transformers/models/{model}/{file.name}"] = data
    info = f"transformers-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{path},sha256={encoded(data)},{len(data)}" for path, data in files.items()] + [f"{info}/RECORD,,"]
    files[f"{info}/RECORD"] = ("\n".join(rows) + "\n").encode()
    folder.mkdir(exist_ok=True)
    wheel = folder / f"transformers-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), data)
    return wheel


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    wheels: the folder from which packages are installed. tool: the package manager, uv or pip. link_mode: how uv
    installs files from its cache.
    """

    path: Path
    wheels: Path
    tool: str
    link_mode: str = "copy"

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site(self) -> Site:
        return Site(next(self.path.glob("lib/python*/site-packages")))

    @property
    def cache(self) -> Path:
        return self.wheels.parent / "uv-cache"

    def create(self) -> Environment:
        if self.tool == "uv":
            run([uv(), "venv", "--quiet", "--python", sys.executable, str(self.path)], self._variables())
        else:
            run([sys.executable, "-m", "venv", "--without-pip", str(self.path)], {})
        return self

    def install(self, version: str = VERSION, *options: str, link_mode: str | None = None) -> None:
        self._manage(["install", *self._offline(), *options, f"transformers=={version}"], link_mode or self.link_mode)

    def start_install(self, version: str = VERSION, *options: str) -> subprocess.Popen[str]:
        command = [*self._tool(), "install", *self._place(), *self._offline(), *options, f"transformers=={version}"]
        variables = {**clean(), **self._variables()}
        return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def uninstall(self) -> None:
        self._manage(["uninstall", *(["--yes"] if self.tool == "pip" else []), "transformers"], self.link_mode)

    def hf_rocm(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the hf-rocm command with this environment's own Python."""
        bridge = self.wheels.parent / "bridge"
        if not bridge.exists():
            _bridge(bridge)
        path = os.pathsep.join([*filter(None, [variables.pop("PYTHONPATH", "")]), str(bridge)])
        return subprocess.run(
            [str(self.python), "-m", "hf_rocm", *arguments],
            env={**clean(), "PYTHONPATH": path, **variables},
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
        )

    def _manage(self, arguments: Sequence[str], link_mode: str) -> None:
        verb, *rest = arguments
        run([*self._tool(), verb, *self._place(), *rest], {**self._variables(), "UV_LINK_MODE": link_mode})

    def _tool(self) -> list[str]:
        return [uv(), "pip"] if self.tool == "uv" else [sys.executable, "-m", "pip", "--python", str(self.python)]

    def _place(self) -> list[str]:
        return ["--quiet", "--python", str(self.python)] if self.tool == "uv" else ["--quiet"]

    def _offline(self) -> list[str]:
        return ["--no-index", "--no-deps", "--find-links", str(self.wheels)]

    def _variables(self) -> dict[str, str]:
        return {
            "UV_CACHE_DIR": str(self.cache),
            "UV_OFFLINE": "1",
            "UV_NO_CONFIG": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_LINK_MODE": self.link_mode,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }


def uv() -> str:
    """The path of the real uv. If it is missing, the tests fail instead of being skipped."""
    sibling = Path(sys.executable).parent / "uv"
    if sibling.is_file():
        return str(sibling)
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        result = shutil.which("uv")
    if result is None:
        pytest.fail("these tests use the real uv, which is not installed: pip install uv")
    return result


def run(command: Sequence[str], variables: dict[str, str]) -> str:
    result = subprocess.run(command, env={**clean(), **variables}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def clean() -> dict[str, str]:
    dropped = ("PYTHON", "VIRTUAL_ENV", "CONDA", "UV_", "PIP_", "HF_ROCM")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def _bridge(folder: Path) -> None:
    """Link hf_rocm and all packages in this interpreter's site-packages, except transformers, into the folder."""
    folder.mkdir()
    hf_rocm = importlib.util.find_spec("hf_rocm")
    assert hf_rocm is not None and hf_rocm.origin is not None
    (folder / "hf_rocm").symlink_to(Path(hf_rocm.origin).parent)
    for entry in sys.path:
        if Path(entry).name in ("site-packages", "dist-packages"):
            for result in sorted(Path(entry).iterdir()):
                link = folder / result.name
                if result.suffix != ".pth" and not result.name.startswith("transformers") and not link.is_symlink():
                    link.symlink_to(result)


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
