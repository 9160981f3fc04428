"""Commands: data on stdout, everything else on stderr, and exit codes that scripts can rely on."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from hf_rocm import __version__
from hf_rocm.cli import main
from hf_rocm.cli.app import build
from tests.cli.conftest import Outcome
from tests.overlay.conftest import MODELS, Site, fingerprint, hashes, next_release

Command = Callable[..., Outcome]


def grouped(shown: str) -> dict[str, list[str]]:
    """The state of each model in a table of groups; a row that begins with blanks goes on with the one before."""
    found, state = {}, []
    for line in shown.splitlines():
        first = re.match(r"(.*)transformers-\S+ (.*)", line)
        if first or line.startswith("      "):
            state = first[1].split() if first else state
            found.update(dict.fromkeys(re.findall(r"\w+", first[2] if first else line), state))
    return found


def test_install_status_uninstall(command: Command, site: Site) -> None:
    before = hashes(site.path)
    installed = command("install-overlays")
    assert (installed.code, installed.err) == (0, "")
    assert str(site.root) in installed.out, "the path that is meant is shown"
    assert grouped(installed.out) == {model: ["installed"] for model in MODELS}
    assert command("status").code == 0
    again = command("install-overlays")
    assert again.code == 0 and "nothing to do" in again.out
    removed = command("uninstall-overlays")
    assert removed.code == 0 and grouped(removed.out) == {model: ["removed"] for model in MODELS}
    assert hashes(site.path) == before
    assert "nothing to do" in command("uninstall-overlays").out


def test_a_dry_run_says_would_and_its_plan_is_the_real_one(command: Command, site: Site) -> None:
    before = fingerprint(site.path)
    assert "would install" in command("install-overlays", "--dry-run").out
    planned = json.loads(command("install-overlays", "--dry-run", "--json").out)
    assert fingerprint(site.path) == before
    done = json.loads(command("install-overlays", "--json").out)
    assert (planned.pop("dry_run"), planned.pop("written")) == (True, False)
    assert (done.pop("dry_run"), done.pop("written")) == (False, True)
    assert planned == done
    assert [action["action"] for action in done["actions"]] == ["install"] * len(MODELS)


def one_byte(site: Site) -> Path:
    site.model("llama").write_bytes(site.model("llama").read_bytes() + b" ")
    return site.model("llama")


def unknown_release(site: Site) -> Path:
    site.release("6.1.0")
    return site.root / "__init__.py"


def changed_digest(site: Site) -> Path:
    site.forget_record()
    site.release(next_release(site.installation.version))
    file = site.model("llama")
    file.write_text(file.read_text().replace("class LlamaMLP(nn.Module):", "class LlamaMLP(nn.Module):\n    new = 1\n"))
    return file


def edited_block(site: Site) -> Path:
    from hf_rocm.overlay.commands import install

    install(["llama"], transformers_path=site.path)
    file = site.model("llama")
    file.write_text(file.read_text().replace("# <<< hf-rocm", "mine = 1\n# <<< hf-rocm"))
    return file


@pytest.mark.parametrize("break_it", [one_byte, unknown_release, changed_digest, edited_block])
@pytest.mark.parametrize("models", [(), ("llama",)])
def test_a_refusal_names_file_expected_found_and_the_next_step(
    command: Command, site: Site, break_it: Callable[[Site], Path], models: tuple[str, ...]
) -> None:
    file = break_it(site)
    before = fingerprint(site.path)
    refused = command("install-overlays", *models)
    assert refused.code == 1
    assert refused.out == ""
    assert refused.err.startswith("error: ")
    lines = {line.split()[0]: line for line in refused.err.splitlines() if line.strip()}
    assert str(file) in lines["file"]
    assert lines["expected"].strip() != "expected" and lines["found"].strip() != "found"
    assert lines["hint:"].strip() != "hint:"
    assert fingerprint(site.path) == before


def test_an_editable_install_is_refused(command: Command, site: Site) -> None:
    (site.metadata / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    before = fingerprint(site.path)
    refused = command("install-overlays")
    assert refused.code == 1
    assert "error: transformers is an editable or source checkout" in refused.err
    assert all(f"  {label} " in refused.err for label in ("path", "found", "expected")) and "\nhint: " in refused.err
    assert fingerprint(site.path) == before


def test_a_refusal_as_json_is_data_and_stays_an_error(command: Command, site: Site) -> None:
    file = one_byte(site)
    refused = command("install-overlays", "--json")
    (error,) = json.loads(refused.out)["refused"]
    assert error["facts"]["file"] == str(file)
    assert refused.code == 1 and "error: " in refused.err
    unknown = command("install-overlays", "mistrall", "--json")
    assert unknown.code == 1
    assert json.loads(unknown.out)["message"] == "hf-rocm has no overlay of 'mistrall'"


@pytest.mark.parametrize("name", ["install-overlays", "uninstall-overlays", "status"])
def test_a_model_that_is_not_there_is_an_error(command: Command, name: str) -> None:
    refused = command(name, "llama", "mistrall")
    assert refused.code == 1
    assert "mistrall" in refused.err and " models, such as " in refused.err


def test_status_shows_both_axes_and_calls_for_attention(command: Command, site: Site) -> None:
    command("install-overlays", "llama")
    shown = command("status")
    files, summary = shown.out.splitlines()[1:2], grouped(shown.out)
    assert files == [f"{len(MODELS)} files; installed: {len(MODELS) - 1} no, 1 yes; match: {len(MODELS)} verified"]
    assert summary["llama"] == ["yes", "verified"]
    assert summary["bert"] == ["no", "verified"]
    assert "\033" not in shown.out
    (row,) = (line for line in command("status", "llama").out.splitlines() if line.startswith("llama"))
    assert row.split()[2:4] == ["yes", "verified"]
    edited_block(site)
    shown = command("status", "--json")
    assert shown.code == 1
    (file,) = (file for file in json.loads(shown.out)["files"] if file["model"] == "llama")
    assert (file["installed"], file["match"]) == ("edited", "verified")


def test_status_diff_of_an_installed_file_shows_the_block_as_added_lines(command: Command) -> None:
    command("install-overlays")
    shown = command("status", "--diff", "llama").out
    assert "+# >>> hf-rocm overlay >>>" in shown
    assert "+    def llama_mlp(self, stock, x):" in shown
    assert [line for line in shown.splitlines() if line.startswith("-") and not line.startswith("---")] == []


def test_status_diff_of_an_edited_block_shows_the_edit(command: Command, site: Site) -> None:
    edited_block(site)
    shown = command("status", "--diff", "llama").out
    assert "the block was edited" in shown
    changed = [line for line in shown.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]
    assert changed == ["+mine = 1"]


def test_status_diff_of_a_changed_definition_names_digests_and_releases(command: Command, site: Site) -> None:
    changed_digest(site)
    shown = json.loads(command("status", "--diff", "llama", "--json").out)["files"][0]
    (difference,) = shown["differences"]
    assert difference["name"] == "LlamaMLP"
    assert f"LlamaMLP in {site.model('llama')}: digest {difference['found']}" in shown["diff"]
    for digest, releases in difference["expected"].items():
        assert f"expected digest {digest}, as in transformers {releases[0]}" in shown["diff"]


@pytest.mark.parametrize("arguments", [["install-overlays", "--nonsense"], ["nonsense"], []])
def test_usage_errors_are_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-rocm {__version__}\n"
    assert main(["install-overlays", "--help"]) == 0
    assert "--dry-run" in capsys.readouterr().out


def test_a_bug_is_three_and_says_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("hf_rocm.overlay.commands.survey", broken)
    outcome = command("status")
    assert outcome.code == 3
    assert "bug in hf-rocm" in outcome.err and "ZeroDivisionError: ours" in outcome.err


def test_a_signal_is_its_number_and_undone(command: Command, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_rocm.overlay.disk import Disk

    real = Disk.replace

    def interrupted(self: Disk, source: Path, target: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        real(self, source, target)

    before = hashes(site.path)
    monkeypatch.setattr(Disk, "replace", interrupted)
    outcome = command("install-overlays")
    assert outcome.code == 128 + signal.SIGTERM
    assert "everything was undone" in outcome.err
    monkeypatch.undo()
    assert hashes(site.path) == before


def test_python_m_runs_the_command(site: Site) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_rocm", "status", "--transformers-path", str(site.path), "--json"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["transformers"]["path"] == str(site.root)


def test_ctrl_c_before_anything_is_written_is_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_rocm.overlay.commands.survey", interrupted)
    assert command("install-overlays").code == 128 + signal.SIGINT


def test_a_signal_as_json_is_data_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_rocm.overlay.install import Interrupted

    def interrupted(*arguments: object) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("hf_rocm.overlay.commands.execute", interrupted)
    outcome = command("install-overlays", "--json")
    assert outcome.code == 128 + signal.SIGTERM
    assert json.loads(outcome.out)["error"] == "Interrupted"


@pytest.mark.parametrize("name", ["install-overlays", "uninstall-overlays", "status"])
def test_a_file_that_the_system_won_t_read_is_a_refusal_and_no_bug(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def unreadable(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("hf_rocm.overlay.survey.read_file", unreadable)
    outcome = command(name)
    assert outcome.code == 1
    assert "Permission denied" in outcome.err and "modeling_" in outcome.err and "hint: " in outcome.err


def test_status_record_shows_a_table_and_its_progress_on_a_terminal_only(
    command: Command, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("install-overlays", "bert")
    listed = [row for row in (site.metadata / "RECORD").read_text().splitlines() if row.startswith("transformers/")]
    here = [row for row in listed if (site.path / row.split(",")[0]).is_file()]
    (site.metadata / "RECORD").write_text("\n".join(here) + "\n")
    shown = command("status", "--record")
    assert (shown.code, shown.err) == (0, "")
    assert "overlay  -           models/bert/modeling_bert.py" in shown.out
    assert f"{len(here)} files compared, 1 with our block below them; 0 neither stock nor ours" in shown.out
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True)
        shown = command("status", "--record")
    assert f"{len(here)} of {len(here)} files compared" in shown.err and shown.err.endswith("\r\033[K")
    one_byte(site)
    shown = command("status", "--record", "--json")
    assert shown.code == 1
    assert json.loads(shown.out)["entries"][-1] == {
        "file": str(site.model("llama")),
        "finding": "changed",
        "shared": False,
    }
    assert json.loads(shown.out)["warning"] is None
    (site.metadata / "RECORD").unlink()
    refused = command("status", "--record")
    assert refused.code == 1 and "no record of what transformers was delivered with" in refused.err
    assert command("status", "--record", "llama").code == 2


def test_no_option_is_named_by_its_placeholder_alone():
    """typer 0.26.8 to 0.27.2 takes a placeholder that is the parameter's name in capitals for the option's name."""

    def commands(group, path=()):
        for name, command in getattr(group, "commands", {}).items():
            yield (*path, name), command
            yield from commands(command, (*path, name))

    found = list(commands(typer.main.get_command(build())))
    assert len(found) > 10
    for path, command in found:
        callback = inspect.unwrap(command.callback) if command.callback else None
        for name, hint in (get_type_hints(callback, include_extras=True) if callback else {}).items():
            for option in getattr(hint, "__metadata__", ()):
                if getattr(option, "metavar", None) == name.upper() and isinstance(option, OptionInfo):
                    assert str(option.default).startswith("--"), f"{' '.join(path)}: --{name}"
