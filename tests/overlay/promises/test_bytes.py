"""The files after install-overlays and uninstall-overlays: their bytes, modes and owners, and no other files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm.cli import main
from hf_rocm.errors import OverlayError
from hf_rocm.overlay.commands import install, record, status, uninstall
from hf_rocm.overlay.plan import Verb
from tests.overlay.conftest import MODELS, Site, fingerprint, hashes, next_release

Farm = Callable[[str], Site]


def states(site: Site) -> dict[str, str]:
    return {state.model: state.installed.value for state in status(transformers_path=site.path)[1]}


@pytest.mark.parametrize("selection", [MODELS, ("llama",), ("bert", "qwen3")], ids="+".join)
def test_02_uninstall_restores_every_byte(
    farm: Farm, selection: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = farm("one")
    site.model("llama").chmod(0o640)
    before = hashes(site.path)
    # Install with an older hf-rocm, then twice with this one.
    with monkeypatch.context() as older:
        older.setattr("hf_rocm.overlay.state.__version__", "0.0.9")
        install(selection, transformers_path=site.path)
    install(selection, transformers_path=site.path)
    install(MODELS, transformers_path=site.path)
    uninstall(selection[:1], transformers_path=site.path)
    uninstall(transformers_path=site.path)
    assert hashes(site.path) == before
    assert record(transformers_path=site.path).entries == ()


@pytest.mark.parametrize("ending", [b"", b"\n", b"\n\n", b"# no newline"])
def test_02_a_file_with_any_ending_is_restored(farm: Farm, ending: bytes) -> None:
    site = farm("one")
    site.forget_record()
    site.set_release(next_release(site.installation.version))
    file = site.model("llama")
    stock = file.read_bytes().rstrip(b"\n") + ending
    file.unlink()
    file.write_bytes(stock)
    install(["llama"], transformers_path=site.path)
    assert file.read_bytes() != stock
    uninstall(["llama"], transformers_path=site.path)
    assert file.read_bytes() == stock


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "one byte": lambda data: data + b" ",
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "one definition": lambda data: data.replace(b"(nn.Module):", b"(nn.Module):\n    mine = 1", 1),
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("first", ["edit", "install"])
def test_03_an_edit_is_refused_by_name_and_never_overwritten(
    farm: Farm, edit: Callable[[bytes], bytes], first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site = farm("one")
    file = site.model("llama")
    if first == "install":
        install(transformers_path=site.path)
    edited = edit(file.read_bytes())
    file.unlink()
    file.write_bytes(edited)
    before = fingerprint(site.path)
    # Whether the file has no block, so that there is nothing to uninstall.
    without_block = b"hf-rocm overlay" not in edited
    for command in ["install-overlays"] if without_block else ["install-overlays", "uninstall-overlays"]:
        assert main([command, "--transformers-path", str(site.path)]) == 1
        shown = capsys.readouterr()
        assert str(file) in shown.err and "reinstall transformers" in shown.err
        assert fingerprint(site.path) == before, "a file was written"


@pytest.mark.parametrize("command", [install, uninstall])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("change", ["missing", "edited", "folder"])
def test_04_all_files_are_written_or_none(farm: Farm, command: Callable[..., object], model: str, change: str) -> None:
    site = farm("one")
    if command is uninstall:
        install(transformers_path=site.path)
    file = site.model(model)
    data = file.read_bytes()
    file.unlink()
    if change == "edited":
        file.write_bytes(data + b"# mine\n")
    elif change == "folder":
        file.mkdir()
    before = fingerprint(site.path)
    try:
        command(MODELS, transformers_path=site.path)
    except OverlayError as error:
        assert str(file) in error.facts["file"]
    changed = fingerprint(site.path) != before
    assert changed == (change == "missing" and command is uninstall), "only uninstall may write, if the file is missing"


def test_09_a_second_run_writes_nothing(farm: Farm) -> None:
    site = farm("one")
    for command in (install, uninstall):
        command(transformers_path=site.path)
        before = fingerprint(site.path)
        plan, _ = command(transformers_path=site.path)
        assert {action.verb for action in plan.actions} == {Verb.KEEP}
        assert fingerprint(site.path) == before, "inodes or times have changed"


AS_NOBODY = """
import json, os, sys
from hf_rocm.overlay.commands import install
from hf_rocm.errors import OverlayError
from hf_rocm.overlay.catalog import Overlay, load
# Load the catalog while the files of this Python are still readable.
catalog = load()
texts = {path: path.read_text() for directory in catalog.directories for path in directory.files.values()}
Overlay.text = property(lambda overlay: texts[overlay.path])
import fcntl, stat
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    install(transformers_path=sys.argv[1], catalog=catalog)
except OverlayError as error:
    print(json.dumps(error.to_dict()))
"""


@pytest.mark.parametrize("obstacle", ["folders", "one folder", "owner"])
def test_18_read_only_is_refused_before_anything_is_written(farm: Farm, memory: Path, obstacle: str) -> None:
    site = farm("one")
    memory.chmod(0o755)
    if obstacle != "owner" and os.geteuid() == 0:
        for path in [site.path, *site.path.rglob("*")]:
            os.chown(path, 65534, 65534)
    elif obstacle == "owner" and os.geteuid() != 0:
        pytest.skip("not run: needs root, to run the command as a user who doesn't own the folders")
    closed = [site.model("llama").parent] if obstacle == "one folder" else [site.root, *site.root.rglob("*")]
    for path in closed:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = fingerprint(site.path)
    command = [sys.executable, "-c", AS_NOBODY, str(site.path)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd="/", capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    refused = json.loads(result.stdout)
    assert "is not writable" in refused["message"] and "hf_rocm.activate()" in refused["hint"]
    assert fingerprint(site.path) == before
    for path in closed:
        path.chmod(0o755)


def test_19_a_partial_selection_composes(farm: Farm) -> None:
    site = farm("one")
    before = hashes(site.path)
    expected: set[str] = set()
    for count in (1, 2, 3):
        for models in itertools.combinations(MODELS, count):
            install(models, transformers_path=site.path)
            expected |= set(models)
            removed = models[0]
            uninstall([removed], transformers_path=site.path)
            expected -= {removed}
            assert {model for model, state in states(site).items() if state == "yes"} == expected
            after = hashes(site.path)
            changed = {path for path in before if before[path] != after[path]}
            assert changed == {f"transformers/models/{model}/modeling_{model}.py" for model in expected}
    uninstall(transformers_path=site.path)
    assert hashes(site.path) == before


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o600, 0o664, 0o755])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_20_mode_is_kept_whatever_the_umask(farm: Farm, mode: int, umask: int) -> None:
    site = farm("one")
    file = site.model("bert")
    file.chmod(mode)
    previous = os.umask(umask)
    try:
        for command in (install, uninstall):
            command(["bert"], transformers_path=site.path)
            assert stat.S_IMODE(file.stat().st_mode) == mode
    finally:
        os.umask(previous)


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root")
def test_20_files_that_root_installs_keep_their_owner(farm: Farm) -> None:
    site = farm("one")
    folder, file = site.model("bert").parent, site.model("bert")
    os.chown(file, 12345, 54321)
    os.chown(folder, 12345, 11111)
    # With setgid, new files inherit the folder's group by default.
    folder.chmod(0o2775)
    for command in (install, uninstall):
        command(["bert"], transformers_path=site.path)
        assert (file.stat().st_uid, file.stat().st_gid) == (12345, 54321)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o2775


@pytest.mark.parametrize("command", ["install-overlays", "uninstall-overlays"])
def test_21_a_dry_run_equals_the_real_run_except_for_writing(
    farm: Farm, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site = farm("one")
    if command == "uninstall-overlays":
        install(["llama", "bert"], transformers_path=site.path)
    before = fingerprint(site.path)

    def plan(*options: str) -> dict[str, object]:
        assert main([command, "--json", *options, "--transformers-path", str(site.path)]) == 0
        return json.loads(capsys.readouterr().out)

    planned = plan("--dry-run")
    assert fingerprint(site.path) == before, "a file or a time changed"
    result = plan()
    assert (planned.pop("dry_run"), planned.pop("written")) == (True, False)
    assert (result.pop("dry_run"), result.pop("written")) == (False, True)
    assert planned == result
    after = fingerprint(site.path)
    written = {str(site.path / path) for path in before if before[path] != after[path] and path.endswith(".py")}
    assert written == {action["file"] for action in result["actions"] if action["action"] != "keep"}  # type: ignore[attr-defined]


def test_14_no_other_files_are_added(farm: Farm) -> None:
    site = farm("one")
    before = set(hashes(site.path))
    install(transformers_path=site.path)
    assert set(hashes(site.path)) == before
    shutil.rmtree(site.path)
