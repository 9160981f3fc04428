"""The start page, help, completion and the version of the command line."""

from __future__ import annotations

import inspect
import re
from typing import get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from hf_rocm import __version__
from hf_rocm.cli import main
from hf_rocm.cli.app import build


@pytest.mark.parametrize("name", ["status", "install-overlays", "uninstall-overlays"])
def test_the_help_of_a_list_of_models_shows_no_python_type(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "MODEL" in out and "list[" not in out and "<" not in out


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"]])
def test_the_start_page_has_every_command_and_a_next_step(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(arguments)
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0] for line in lines if line[:2] == "  " and line[2:3].isalpha()}
    assert listed >= set(typer.main.get_command(build()).commands)
    assert lines[-1].startswith("next: hf-rocm doctor") and max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_fits_the_terminal_breaks_no_words_and_has_the_options_of_a_model(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_rocm.tools.bench.known_shapes import SHAPES
    from hf_rocm.tools.bench.variants import LABELS

    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= min(columns, 120)
    assert {"--config", "--prompt", "--chart", *LABELS} <= set(re.findall(r"[\w-]+", shown))
    assert all(re.search(rf"\b{name}[,.]", shown) for name in SHAPES)
    assert "<bool>" not in shown and "\n  ops " in shown
    assert main(["bench", "a-model", "--help"]) == 0 and capsys.readouterr().out == shown
    assert main(["help", "tune"]) == 0 and "--shapes-only" in capsys.readouterr().out
    assert main(["help", "nonsense"]) == 2


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("bench --config llama-7", ["llama-70b"]),
        ("install-overlays qwen3_5", ["qwen3_5", "qwen3_5_moe"]),
        ("uninst", ["uninstall-overlays"]),
        ("bench --con", ["--config"]),
        ("bench --hel", ["--help"]),
        ("bench se", ["serve"]),
        ("tune --shapes-", ["--shapes-only"]),
        ("verify --config tiny-l", ["tiny-llama"]),
        ("help ben", ["bench"]),
    ],
)
def test_shells_complete_commands_models_and_shapes(
    words: str, completed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_HF_ROCM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"hf-rocm {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    main([])
    assert capsys.readouterr().out.split() == completed


def test_version_and_help_are_printed_with_exit_code_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-rocm {__version__}\n"
    assert main(["install-overlays", "--help"]) == 0
    assert "--dry-run" in capsys.readouterr().out


def test_every_command_accepts_the_short_option_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    def commands(group: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        inner = getattr(group, "commands", {})
        return [path, *(deeper for name, command in inner.items() for deeper in commands(command, (*path, name)))]

    for path in [*commands(typer.main.get_command(build())), ("bench", "a-model"), ("tune", "a-model")]:
        assert main([*path, "--help"]) == 0
        shown = capsys.readouterr().out
        assert main([*path, "-h"]) == 0, path
        assert capsys.readouterr().out == shown and shown.count("-h, --help") == 1, path


def test_no_option_is_named_only_by_its_placeholder():
    """typer 0.26.8 to 0.27.2 use a placeholder as the option's name if it is the parameter's name in capitals."""

    def commands(group, path=()):
        for name, command in getattr(group, "commands", {}).items():
            yield (*path, name), command
            yield from commands(command, (*path, name))

    result = list(commands(typer.main.get_command(build())))
    assert len(result) > 10
    for path, command in result:
        callback = inspect.unwrap(command.callback) if command.callback else None
        for name, hint in (get_type_hints(callback, include_extras=True) if callback else {}).items():
            for option in getattr(hint, "__metadata__", ()):
                if getattr(option, "metavar", None) == name.upper() and isinstance(option, OptionInfo):
                    assert str(option.default).startswith("--"), f"{' '.join(path)}: --{name}"
