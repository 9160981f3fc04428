"""The wheel contains the whole package and all overlays, and no other files except its metadata."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import hf_rocm
from tests.packaging.conftest import ROOT, Run


def files_of(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path):
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def sources(folder: str, prefix: str) -> set[str]:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}" for path in files}


def test_the_wheel_has_the_package_and_the_overlays_and_nothing_else(wheel: Path) -> None:
    overlays = sources("overlays", "hf_rocm/_overlays")
    assert any(name.endswith("/llama/modeling_llama.py") for name in overlays)
    assert files_of(wheel) == sources("hf_rocm", "hf_rocm") | overlays


def test_the_wheel_contains_the_licence(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    assert metadata_of(wheel)["License-Expression"] == "Apache-2.0"


def test_the_wheel_made_from_the_sdist_has_the_same_files(
    wheel: Path, build: Callable[[str, Path, Path], Path], tmp_path: Path
) -> None:
    archive = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (tmp_path / "source").iterdir()
    assert files_of(build("wheel", source, tmp_path / "wheel")) == files_of(wheel)


def test_no_requirement_pins_torch_or_names_triton(wheel: Path) -> None:
    requirements = [Requirement(text) for text in metadata_of(wheel).get_all("Requires-Dist")]
    assert "torch" in {requirement.name for requirement in requirements}
    assert [str(requirement) for requirement in requirements if requirement.name == "torch"] == ["torch"]
    assert not [
        requirement.name
        for requirement in requirements
        if "triton" in requirement.name or requirement.name.startswith("nvidia")
    ]


@pytest.mark.parametrize("command", [["-m", "hf_rocm"], ["bin/hf-rocm"]], ids=["python -m hf_rocm", "hf-rocm"])
def test_the_command_line_starts(command: list[str], installed: Path, run: Run) -> None:
    words = [str(installed / word) if "/" in word else word for word in command]
    result = run(*words, "--version", path=installed)
    assert (result.returncode, result.stdout.strip()) == (0, f"hf-rocm {hf_rocm.__version__}"), result.stderr
    assert run(*words, "no-such-command", path=installed).returncode == 2


def test_the_installed_wheel_loads_its_overlays(installed: Path, run: Run) -> None:
    code = "from hf_rocm.overlay import catalog; print(*sorted(catalog.load().models()))"
    result = run("-c", code, path=installed)
    models = {file.parent.name for file in (ROOT / "overlays").glob("*/models/*/modeling_*.py")}
    assert set(result.stdout.split()) == models and len(models) > 60, result.stderr


def test_the_tests_run_against_the_wheel() -> None:
    if not sys.flags.isolated:
        pytest.skip("only scripts/test tests the installed wheel")
    package = Path(hf_rocm.__file__).parent
    assert package.parent.name == "site-packages"
    assert (package / "_overlays").is_dir()
