"""The commands of docs/adding-a-model.md, as far as they run without a network: they are there and do what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.overlay.conftest import installed_package
from tests.overlay.test_scripts import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.findall(r"^    ((?:scripts|pytest|python|hf-rocm)\b.*)$", PAGE, re.M)
]


def test_every_command_takes_the_options_that_the_page_gives() -> None:
    assert {command[0] for command in COMMANDS} >= {
        "scripts/new-overlay",
        "scripts/refresh-digests",
        "pytest",
        "hf-rocm",
    }
    for command in COMMANDS:
        if command[0].startswith("scripts/"):
            assert (ROOT / command[0]).stat().st_mode & 0o111
            options = [word for word in command if word.startswith("--")]
            text = (ROOT / command[0]).read_text(encoding="utf-8")
            assert all(option in text for option in options), command
        elif command[0] == "hf-rocm":
            help_of = [sys.executable, "-m", "hf_rocm", command[1], "--help"]
            shown = subprocess.run(help_of, capture_output=True, text=True, check=True, cwd=ROOT).stdout
            assert all(word in shown for word in command if word.startswith("--")), command
    for path in re.findall(r"`((?:tests|hf_rocm|overlays|docs)/[\w./-]+)`", PAGE):
        if "mistral" not in path:
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("model", ["mistral", "cohere"])
def test_the_draft_prints_what_the_page_shows(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if model == "mistral" and transformers.__version__.startswith("4.53."):
        pytest.skip("the page shows what newer releases have: a decoder layer of the common form")
    (tmp_path / "transformers-4.53").mkdir()
    (tmp_path / "transformers-4.53" / "manifest.toml").write_text('transformers = ">=4.53,<6"\n')
    arguments = [model, "--stock", str(installed_package()), "--directory", "transformers-4.53"]
    assert load("new-overlay").main([*arguments, "--overlays", str(tmp_path)]) == 0
    shown = capsys.readouterr().err.splitlines()
    expected = [line.strip() for line in re.findall(r"^    (?:served|left to you): .*$", PAGE, re.M)]
    prefix = model.capitalize()
    assert [line for line in expected if f": {prefix}" in line]
    assert set(expected) & set(shown) == {line for line in expected if f": {prefix}" in line}


def test_a_reason_as_on_the_page_is_read(tmp_path: Path) -> None:
    from hf_rocm.overlay import manifest

    (example,) = re.findall(r"^    \[mistral\]\n((?:    .*\n)+)", PAGE, re.M)
    text = 'transformers = ">=4.53,<6"\n[mistral]\n' + example
    assert manifest.parse(text, source="the page").limits["mistral"].transformers == ">=4.54"
