"""The commands, file paths and examples in docs/adding-a-model.md are valid."""

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

# script → the file that defines its options
_SOURCES = {"scripts/test": "scripts/lib/testing.py"}


def test_every_command_accepts_the_options_on_the_page() -> None:
    assert {command[0] for command in COMMANDS} >= {
        "scripts/new-overlay",
        "scripts/refresh-digests",
        "scripts/run-upstream-tests",
        "scripts/test",
        "hf-rocm",
    }
    for command in COMMANDS:
        if command[0].startswith("scripts/"):
            assert (ROOT / command[0]).stat().st_mode & 0o111
            options = [word for word in command if word.startswith("--")]
            text = (ROOT / _SOURCES.get(command[0], command[0])).read_text(encoding="utf-8")
            # pytest's options follow `--`.
            options = options[: options.index("--")] if "--" in options else options
            assert all(option in text for option in options), command
        elif command[0] == "hf-rocm":
            help_of = [sys.executable, "-m", "hf_rocm", command[1], "--help"]
            shown = subprocess.run(help_of, capture_output=True, text=True, check=True, cwd=ROOT).stdout
            assert all(word in shown for word in command if word.startswith("--")), command
    for path in re.findall(r"`((?:tests|hf_rocm|overlays|docs)/[\w./-]+)`", PAGE):
        if "jais2" not in path:
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("model", "drafted"), [("jais2", "layers.PreNormLayer()"), ("exaone_moe", "layers.StackedExperts()")]
)
def test_the_draft_prints_the_output_on_the_page(
    model: str, drafted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (installed_package() / "models" / model).is_dir():
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    folder = tmp_path / "transformers-5.0"
    folder.mkdir()
    (folder / "manifest.toml").write_text('transformers = ">=5.0,<6"\n')
    arguments = [model, "--stock", str(installed_package()), "--directory", folder.name]
    assert load("new-overlay").main([*arguments, "--overlays", str(tmp_path)]) == 0
    shown = capsys.readouterr().err.splitlines()
    assert drafted in PAGE and drafted in (folder / "models" / model / f"modeling_{model}.py").read_text()
    prefix = model.capitalize()
    expected = [line.strip() for line in re.findall(rf"^    (?:served|left to you): {prefix}.*$", PAGE, re.M)]
    assert set(expected) <= set(shown) and bool(expected) == (model == "jais2")


def test_the_reason_on_the_page_is_valid(tmp_path: Path) -> None:
    from hf_rocm.overlay import manifest

    (example,) = re.findall(r"^    \[jais2\]\n((?:    .*\n)+)", PAGE, re.M)
    text = 'transformers = ">=5.0,<6"\n[jais2]\n' + example
    assert manifest.parse(text, source="the page").limits["jais2"].transformers == ">=5.1"
