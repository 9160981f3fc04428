"""Commands: data on stdout, everything else on stderr, and exit codes that scripts can rely on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm import variables
from hf_rocm.cli import execution, main
from hf_rocm.overlay.facts import TorchFacts
from tests.cli.conftest import Outcome
from tests.overlay.conftest import MODELS, Site, fingerprint, hashes, next_release

Command = Callable[..., Outcome]


def grouped(shown: str) -> dict[str, list[str]]:
    """The state of every model in a table of groups. A row that begins with spaces continues the previous one."""
    result, state = {}, []
    for line in shown.splitlines():
        first = re.match(r"(.*)transformers-\S+ (.*)", line)
        if first or line.startswith("      "):
            state = first[1].split() if first else state
            result.update(dict.fromkeys(re.findall(r"\w+", first[2] if first else line), state))
    return result


def test_installing_and_uninstalling_show_every_model_and_repeating_does_nothing(command: Command, site: Site) -> None:
    before = hashes(site.path)
    installed = command("install-overlays", "--all")
    assert (installed.code, installed.err) == (0, "")
    assert str(site.root) in installed.out, "the path is not shown"
    assert grouped(installed.out) == {model: ["installed"] for model in MODELS}
    assert command("status").code == 0
    again = command("install-overlays")
    assert again.code == 0 and "nothing to do" in again.out
    removed = command("uninstall-overlays", "--all")
    assert removed.code == 0 and grouped(removed.out) == {model: ["removed"] for model in MODELS}
    assert hashes(site.path) == before
    again = command("uninstall-overlays").out.splitlines()
    assert again[0].startswith("transformers ") and again[-1] == "nothing to do"


@pytest.mark.parametrize("everything", [False, True])
def test_many_overlays_are_counted_and_the_option_that_lists_them_is_named_without_it(
    everything: bool, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_NAMED", len(MODELS) - 1)
    shown = command("install-overlays", *(["--all"] if everything else []))
    assert f"installed {len(MODELS)} overlays" in shown.out
    assert ("(--all lists them)" in shown.out) is not everything


def test_written_files_are_named_and_the_rest_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    installed = command("install-overlays", "llama", "bert").out.splitlines()
    assert installed[-3:] == [
        "installed 2 overlays: llama, bert",
        "inert here: this torch is not a ROCm build, so these models stay stock",
        "next: hf-rocm status; hf-rocm explain MODEL",
    ]
    again = command("install-overlays", "llama").out.splitlines()
    assert again[-1] == "nothing to do; 1 was already installed"
    transformers, *removed = command("uninstall-overlays").out.splitlines()[-2:]
    rest = f"; {len(MODELS) - 2} were not installed"
    assert removed in ([f"removed 2 overlays: {names}{rest}"] for names in ("llama, bert", "bert, llama"))
    assert "not installed" not in transformers


def test_overlays_that_are_not_inert_are_not_called_inert(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "torch_facts", lambda: TorchFacts("", "2.11.0", "7.2", None))
    assert "inert" not in command("install-overlays", "llama").out
    monkeypatch.undo()
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    assert "inert" not in command("install-overlays", "bert").out


@pytest.mark.parametrize("name", ["status", "install-overlays", "uninstall-overlays"])
def test_a_misspelt_variable_causes_a_warning(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ROCM_FROCE", "1")
    monkeypatch.setattr(variables, "_warned", set())
    command(name)
    assert caplog.messages == ["HF_ROCM_FROCE is not an option of hf_rocm; did you mean HF_ROCM_FORCE?"]


@pytest.mark.parametrize("name", ["status", "install-overlays", "uninstall-overlays"])
def test_an_invalid_option_causes_a_note_and_stops_none_of_these_commands(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ROCM_FORCE", "maybe")
    done = command(name, "llama")
    assert done.code == 0 and "HF_ROCM_FORCE=maybe is not valid" in done.err
    assert "inert" in done.out or name != "install-overlays", "an invalid value enables nothing"


def test_groups_are_in_the_order_of_releases(capsys: pytest.CaptureFixture[str]) -> None:
    from hf_rocm.cli.output import print_groups

    releases = ["transformers-5.13", "transformers-5.2", "transformers-4.57", "-"]
    print_groups(("state", "overlays"), ((("no", release), "llama") for release in releases))
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == ["-", "transformers-4.57", "transformers-5.2", "transformers-5.13"]


def test_a_dry_run_prints_the_real_plan(command: Command, site: Site) -> None:
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
    site.set_release("6.1.0")
    return site.root / "__init__.py"


def changed_digest(site: Site) -> Path:
    site.forget_record()
    site.set_release(next_release(site.installation.version))
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


def test_a_refusal_as_json_is_data_with_an_error_exit_code(command: Command, site: Site) -> None:
    file = one_byte(site)
    refused = command("install-overlays", "--json")
    (error,) = json.loads(refused.out)["refused"]
    assert error["facts"]["file"] == str(file)
    assert refused.code == 1 and "error: " in refused.err
    unknown = command("install-overlays", "mistrall", "--json")
    assert unknown.code == 1
    assert json.loads(unknown.out)["message"] == "hf-rocm has no overlay for 'mistrall'"


@pytest.mark.parametrize("name", ["install-overlays", "uninstall-overlays", "status"])
def test_an_unknown_model_is_an_error(command: Command, name: str) -> None:
    refused = command(name, "llama", "mistrall")
    assert refused.code == 1
    assert "mistrall" in refused.err and " models, such as " in refused.err


def test_status_shows_both_axes_and_what_needs_attention(command: Command, site: Site) -> None:
    command("install-overlays", "llama")
    verdict = command("status").out.splitlines()[-1]
    assert verdict == f"1 of {len(MODELS)} overlays is installed; all match the installed transformers"
    shown = command("status", "--all")
    summary = grouped(shown.out)
    assert summary["llama"] == ["yes", "verified"]
    assert summary["bert"] == ["no", "verified"]
    assert "\033" not in shown.out
    (row,) = (line for line in command("status", "llama").out.splitlines() if line.startswith("llama"))
    assert row.split()[2:4] == ["yes", "verified"]
    edited_block(site)
    shown = command("status")
    assert "1 needs attention: llama (edited)" in " ".join(shown.out.split())
    assert shown.out.splitlines()[-1] == "next: hf-rocm status --diff llama"
    shown = command("status", "--json")
    assert shown.code == 1
    (file,) = (file for file in json.loads(shown.out)["files"] if file["model"] == "llama")
    assert (file["installed"], file["match"]) == ("edited", "verified")


@pytest.mark.parametrize("columns", [60, 80])
def test_status_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line fits, except a path that is longer than the terminal is wide; such a path has its own line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["status", "--all"])
    shown = capsys.readouterr().out
    wide = [line for line in shown.splitlines() if len(line) > columns]
    assert "transformers-" in shown and all(line.startswith("  /") and len(line.split()) == 1 for line in wide)


def test_status_diff_of_an_installed_file_shows_the_block_as_added_lines(command: Command) -> None:
    command("install-overlays")
    shown = command("status", "--diff", "llama").out
    assert "+# >>> hf-rocm overlay >>>" in shown
    assert "+    overlay.binds(LlamaMLP, layers.GatedMLP())" in shown
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
def test_usage_errors_exit_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2


def test_a_bug_exits_with_three_and_is_reported_as_a_bug(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("hf_rocm.overlay.commands.survey", broken)
    outcome = command("status")
    assert outcome.code == 3
    assert "bug in hf-rocm" in outcome.err and "ZeroDivisionError: a defect" in outcome.err


def test_after_a_signal_the_exit_code_is_128_plus_its_number_and_the_run_is_undone(
    command: Command, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    result = subprocess.run(
        [sys.executable, "-m", "hf_rocm", "status", "--transformers-path", str(site.path), "--json"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)["transformers"]["path"] == str(site.root)


def test_ctrl_c_before_any_write_exits_with_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_rocm.overlay.commands.survey", interrupted)
    assert command("install-overlays").code == 128 + signal.SIGINT


def test_a_signal_as_json_is_data(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_rocm.overlay.install import Interrupted

    def interrupted(*arguments: object) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("hf_rocm.overlay.commands.execute", interrupted)
    outcome = command("install-overlays", "--json")
    assert outcome.code == 128 + signal.SIGTERM
    assert json.loads(outcome.out)["error"] == "Interrupted"


@pytest.mark.parametrize("name", ["install-overlays", "uninstall-overlays", "status"])
def test_an_unreadable_file_is_a_refusal(command: Command, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def unreadable(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("hf_rocm.overlay.scan.read_file", unreadable)
    outcome = command(name)
    assert outcome.code == 1
    assert "Permission denied" in outcome.err and "modeling_" in outcome.err and "hint: " in outcome.err


def test_status_record_shows_a_table_and_its_progress_on_a_terminal_only(
    command: Command, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("install-overlays", "bert")
    listed = [row for row in (site.metadata / "RECORD").read_text().splitlines() if row.startswith("transformers/")]
    present = [row for row in listed if (site.path / row.split(",")[0]).is_file()]
    (site.metadata / "RECORD").write_text("\n".join(present) + "\n")
    shown = command("status", "--record")
    assert (shown.code, shown.err) == (0, "")
    assert "overlay  -           models/bert/modeling_bert.py" in shown.out
    summary = "1 with a block of hf-rocm appended; 0 missing, or neither stock nor written by this hf-rocm"
    assert f"{len(present)} files compared, {summary}" in shown.out
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True)
        shown = command("status", "--record")
    assert f"{len(present)} of {len(present)} files compared" in shown.err and shown.err.endswith("\033[2K"), (
        "not erased"
    )
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
    assert refused.code == 1 and "left no record of transformers' files" in refused.err
    assert command("status", "--record", "llama").code == 2
