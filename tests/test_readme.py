"""The README agrees with the source code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_rocm.overlay.catalog import load

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_options_table_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "update-readme"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_tested_releases_are_those_of_the_test_environments() -> None:
    (row,) = re.findall(r"^\| transformers \|(.*)\|$", README, re.MULTILINE)
    (tested,) = [clause for clause in row.split(";") if "tested" in clause]
    source = (ROOT / "scripts" / "lib" / "environments.py").read_text(encoding="utf-8")
    (releases,) = re.findall(r"^RELEASES = (\(.*\))$", source, re.MULTILINE)
    assert re.findall(r"\d+\.\d+\.\d+", tested) == list(ast.literal_eval(releases))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/docker.md"])
def test_commands_that_install_hf_rocm_select_a_release_that_was_checked(page: str) -> None:
    commands = re.findall(
        r"pip install [^#\n]*(?:'?\.(?:\[rocm\]')?|/opt/hf_rocm)(?= |$).*", (ROOT / page).read_text(), re.M
    )
    catalog = load()
    newest = Version(max((release for model in catalog.models() for release in catalog.releases(model)), key=Version))
    assert commands
    for command in commands:
        (bound,) = re.findall(r"'transformers(<[\d.]+)'", command)
        assert newest in SpecifierSet(bound), command
        assert Version(f"{newest.major}.{newest.minor + 1}") not in SpecifierSet(bound), command


def test_every_named_script_exists_and_is_executable() -> None:
    scripts = set(re.findall(r"scripts/[\w-]+", README))
    assert {"scripts/demo", "scripts/test", "scripts/check"} <= scripts
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111, script
