"""scripts/install-aiter builds aiter for this GPU, keeps torch and Triton, and names a next step if it refuses."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def installer():
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("lib.install_aiter")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def machine(installer):
    return installer.Machine(
        torch="2.9.0+rocm6.4", hip="6.4.43482", arch="gfx942", hipcc=True, other_aiter=False, aiter=None
    )


def test_the_default_is_a_build_from_source_for_this_gpu(installer, machine):
    plan = installer.plan(machine)
    assert plan.variables == {"GPU_ARCHS": "gfx942"}
    assert plan.commands[-1][-1].endswith(f"ROCm/aiter.git@v{installer.RELEASE}")
    assert "--no-deps" in plan.commands[-1] and "--no-build-isolation" in plan.commands[-1]
    for command in plan.commands:
        assert not {"torch", "triton"} & set(command)


def test_the_build_on_pypi_is_reported_with_its_limitations(installer, machine):
    plan = installer.plan(machine, pypi=True)
    assert plan.commands[-1] == ("install", "--no-deps", f"amd-aiter=={installer.PYPI}")
    text = "\n".join(plan.notes)
    assert "does not check whether a weight is shuffled" in text and "table of tuned GEMMs" in text
    replaced = installer.plan(dataclasses.replace(machine, aiter=installer.PYPI))
    assert "does not check whether a weight is shuffled" in "\n".join(replaced.notes)


def test_an_unchecked_release_is_reported(installer, machine):
    note = "0.1.22 is newer than 0.1.21.dev46, the last checked release: set HF_ROCM_TIER=aiter to use it"
    assert note in installer.plan(machine, release="0.1.22").notes
    assert not any("newer" in note for note in installer.plan(machine).notes)


def test_the_unrelated_package_is_uninstalled_first(installer, machine):
    plan = installer.plan(dataclasses.replace(machine, other_aiter=True))
    assert plan.commands[0] == ("uninstall", "--yes", "aiter")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": None}, "found  no torch"),
        ({"hip": None}, "which is not built for ROCm"),
        ({"arch": None}, "no AMD GPU was found"),
        ({"arch": "gfx1030"}, "found  gfx1030"),
        ({"hipcc": False}, "no hipcc on PATH"),
    ],
)
def test_refusals_name_the_next_step(installer, machine, changes, words):
    with pytest.raises(installer.ScriptError, match=words) as caught:
        installer.plan(dataclasses.replace(machine, **changes))
    assert "hint: " in str(caught.value)


def test_installed_packages_are_pinned(installer):
    # the pin is the version in the package metadata, because torch.__version__ may contain a build tag
    assert f"torch=={version('torch')}" in installer.pins()


def test_the_command_refuses_a_torch_without_rocm():
    paths = f"import sys; sys.path[:] = {sys.path!r}; sys.argv = ['install-aiter', '--dry-run']; "
    script = str(SCRIPTS / "install-aiter")
    run = f"import runpy; sys.path.insert(0, {str(SCRIPTS)!r}); runpy.run_path({script!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", paths + run], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "aiter needs a ROCm build of PyTorch" in result.stderr
