"""Writing to an installed transformers: all files or none, no other files, and an exact uninstall."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.commands import install, status, uninstall
from hf_rocm.overlay.disk import Disk
from hf_rocm.overlay.install import LEFTOVER, Interrupted, execute
from hf_rocm.overlay.plan import Plan, Verb, plan_install, plan_uninstall
from hf_rocm.overlay.scan import survey
from hf_rocm.overlay.state import Installed
from tests.overlay.conftest import MODELS, Site, fingerprint, hashes, make_site

CALLS = (
    "read",
    "stat",
    "list",
    "create",
    "write",
    "own",
    "mode",
    "sync",
    "close",
    "replace",
    "remove",
    "open_directory",
)


def states(site: Site) -> dict[str, str]:
    return {state.model: state.installed.value for state in status(transformers_path=site.path)[1]}


def test_uninstall_restores_content_and_mode_of_the_whole_tree(whole_site: Site) -> None:
    before = hashes(whole_site.path)
    install(transformers_path=whole_site.path)
    between = hashes(whole_site.path)
    assert {path for path in before if before[path] != between[path]} == {
        f"transformers/models/{state.model}/modeling_{state.model}.py"
        for state in status(transformers_path=whole_site.path).states
    }
    assert before.keys() == between.keys(), "there are other files"
    uninstall(transformers_path=whole_site.path)
    assert hashes(whole_site.path) == before


def test_a_second_run_writes_nothing(site: Site) -> None:
    for command, verb in ((install, Verb.INSTALL), (uninstall, Verb.REMOVE)):
        plan, _ = command(transformers_path=site.path)
        assert {action.verb for action in plan.actions} == {verb}
        before = fingerprint(site.path)
        plan, _ = command(transformers_path=site.path)
        assert {action.verb for action in plan.actions} == {Verb.KEEP}
        assert fingerprint(site.path) == before


def test_stock_bytes_are_unchanged(site: Site) -> None:
    stock = site.model("qwen3").read_bytes()
    install(["qwen3"], transformers_path=site.path)
    assert site.model("qwen3").read_bytes().startswith(stock)


def test_a_dry_run_has_the_same_plan_and_writes_nothing(site: Site) -> None:
    before = fingerprint(site.path)
    planned, _ = install(transformers_path=site.path, dry_run=True)
    assert fingerprint(site.path) == before
    done, _ = install(transformers_path=site.path)
    assert planned.to_dict() == done.to_dict()


def test_partial_selections_can_be_combined(site: Site) -> None:
    before = hashes(site.path)
    install(["llama", "bert"], transformers_path=site.path)
    install(["gemma"], transformers_path=site.path)
    uninstall(["llama"], transformers_path=site.path)
    assert states(site) == {"bert": "yes", "gemma": "yes", "llama": "no", "qwen3": "no"}
    uninstall(transformers_path=site.path)
    assert hashes(site.path) == before


def test_one_bad_file_prevents_all_writes(site: Site) -> None:
    site.model("llama").write_bytes(site.model("llama").read_bytes() + b"#")
    before = fingerprint(site.path)
    plan, _ = install(transformers_path=site.path)
    assert [error.facts["file"] for error in plan.refusals] == [str(site.model("llama"))]
    assert fingerprint(site.path) == before
    with pytest.raises(OverlayError):
        plan.check()


def test_an_edited_block_is_neither_updated_nor_removed(site: Site) -> None:
    install(transformers_path=site.path)
    data = site.model("llama").read_bytes()
    site.model("llama").write_bytes(data.replace(b"# <<< hf-rocm", b"mine = 1\n# <<< hf-rocm"))
    before = fingerprint(site.path)
    for command in (install, uninstall):
        plan, _ = command(transformers_path=site.path)
        (error,) = plan.refusals
        assert error.facts["found"] == "the block was edited"
        assert fingerprint(site.path) == before


def test_a_block_of_another_release_is_replaced(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = site.model("llama").read_bytes()
    with monkeypatch.context() as older:
        older.setattr("hf_rocm.overlay.state.__version__", "0.0.1")
        install(["llama"], transformers_path=site.path)
    assert states(site)["llama"] == "old"
    plan, _ = install(["llama"], transformers_path=site.path)
    assert [action.verb for action in plan.actions] == [Verb.UPDATE]
    assert states(site)["llama"] == "yes"
    assert site.model("llama").read_bytes().startswith(stock)


def test_overlays_are_not_reported_as_installed_after_transformers_is_reinstalled(site: Site, tmp_path: Path) -> None:
    install(transformers_path=site.path)
    # like pip, remove the installed files, then unpack the wheel again
    fresh = make_site(tmp_path / "fresh")
    for file in [path for path in fresh.path.rglob("*") if path.is_file()]:
        (site.path / file.relative_to(fresh.path)).unlink()
    assert [path for path in site.path.rglob("*") if not path.is_dir()] == [], "files of hf-rocm remain"
    fresh_again = make_site(site.path / "again")
    for name in ("transformers", fresh_again.metadata.name):
        subprocess.run(["cp", "-r", str(fresh_again.path / name), str(site.path)], check=True)
    assert set(states(site).values()) == {"no"}


def test_other_hard_links_to_a_file_are_unchanged(site: Site, tmp_path: Path) -> None:
    twin = tmp_path / "cache.py"
    os.link(site.model("llama"), twin)
    before, status_before = twin.read_bytes(), twin.stat()
    install(["llama"], transformers_path=site.path)
    assert twin.read_bytes() == before
    assert (twin.stat().st_mtime_ns, twin.stat().st_ino) == (status_before.st_mtime_ns, status_before.st_ino)
    assert twin.stat().st_nlink == 1
    uninstall(["llama"], transformers_path=site.path)
    assert twin.read_bytes() == before == site.model("llama").read_bytes()


@pytest.mark.parametrize("mode", [0o444, 0o600, 0o644, 0o664, 0o755])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_mode_is_kept_whatever_the_umask(site: Site, mode: int, umask: int) -> None:
    site.model("bert").chmod(mode)
    previous = os.umask(umask)
    try:
        install(["bert"], transformers_path=site.path)
        assert stat.S_IMODE(site.model("bert").stat().st_mode) == mode
        uninstall(["bert"], transformers_path=site.path)
        assert stat.S_IMODE(site.model("bert").stat().st_mode) == mode
    finally:
        os.umask(previous)


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root")
def test_owner_is_kept(site: Site) -> None:
    os.chown(site.model("bert"), 12345, 54321)
    install(["bert"], transformers_path=site.path)
    assert (site.model("bert").stat().st_uid, site.model("bert").stat().st_gid) == (12345, 54321)


def test_a_read_only_folder_is_refused_before_anything_is_written(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "llama")
    before = fingerprint(site.path)
    with pytest.raises(OverlayError, match="is not writable") as refused:
        install(transformers_path=site.path)
    assert refused.value.facts["file"] == str(site.model("llama"))
    assert "activate" in (refused.value.hint or "")
    assert fingerprint(site.path) == before


def test_every_compiled_file_is_removed(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = site.model("bert")
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    prefixed = Path(importlib.util.cache_from_source(str(source)))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    cached = [Path(importlib.util.cache_from_source(str(source), optimization=level)) for level in ("", "1", "2")]
    foreign = source.parent / "__pycache__" / "modeling_bert.cpython-399.pyc"
    legacy = source.with_suffix(".pyc")
    stale = [prefixed, *cached, foreign, legacy]
    others = [
        source.parent / "__pycache__" / "modeling_bert_other.cpython-311.pyc",
        source.parent / "configuration_bert.pyc",
    ]
    for command in (install, uninstall):
        for path in stale + others:
            path.parent.mkdir(parents=True, exist_ok=True)
            py_compile.compile(str(source), str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
        command(["bert"], transformers_path=site.path)
        monkeypatch.setattr(sys, "pycache_prefix", None)
        assert [path for path in stale if path.exists()] == []
        assert all(path.exists() for path in others)


class Faulty(Disk):
    """Fail at the n-th call of any kind with a given error, and count the calls."""

    def __init__(self, fail_at: int = 0, fault: Callable[[], BaseException] | None = None) -> None:
        self.calls, self.fail_at, self.fault = 0, fail_at, fault

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in CALLS:
            return value

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at and self.fault is not None:
                if name == "close":
                    # The descriptor is closed even if close reports an error.
                    value(*arguments)
                raise self.fault()
            return value(*arguments)

        return call


def planned(site: Site, catalog: Catalog, command: str) -> Plan:
    plan = plan_install if command == "install" else plan_uninstall
    return plan(site.installation, survey(site.installation, catalog))


@pytest.mark.parametrize("command", ["install", "uninstall"])
@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EACCES"])
def test_a_failure_at_any_call_undoes_the_run(site: Site, catalog: Catalog, command: str, code: str) -> None:
    import errno

    if command == "uninstall":
        install(transformers_path=site.path)
    before = hashes(site.path)
    compiled = Path(importlib.util.cache_from_source(str(site.model("bert"))))
    compiled.parent.mkdir()
    compiled.touch()
    fault_free = Faulty()
    execute(planned(site, catalog, command), disk=fault_free)
    assert hashes(site.path) != before
    install(transformers_path=site.path) if command == "uninstall" else uninstall(transformers_path=site.path)
    assert hashes(site.path) == before
    assert fault_free.calls > 40
    number = getattr(errno, code)
    undone = 0
    for call in range(1, fault_free.calls + 1):
        compiled.touch()
        try:
            execute(planned(site, catalog, command), disk=Faulty(call, lambda: OSError(number, os.strerror(number))))
        except OverlayError as error:
            undone += 1
            assert "everything was undone" in error.message, call
            assert os.strerror(number) in error.facts["found"], call
        assert hashes(site.path) == before, f"call {call} of {fault_free.calls}"
    assert undone == fault_free.calls


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_every_third_call_undoes_the_run(site: Site, catalog: Catalog, number: int) -> None:
    before = hashes(site.path)
    fault_free = Faulty()
    execute(planned(site, catalog, "install"), disk=fault_free)
    uninstall(transformers_path=site.path)

    class Signalled(Faulty):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in CALLS and self.calls + 1 == self.fail_at:
                signal.raise_signal(number)
            return value

    handler = signal.getsignal(number)
    for call in range(1, fault_free.calls + 1, 3):
        with pytest.raises(Interrupted) as interrupted:
            execute(planned(site, catalog, "install"), disk=Signalled(call))
        assert interrupted.value.signal == number
        assert hashes(site.path) == before, call
        assert signal.getsignal(number) is handler


@pytest.mark.parametrize("command", [install, uninstall])
def test_the_next_run_of_either_command_removes_the_files_of_a_killed_run(
    site: Site, command: Callable[..., Any]
) -> None:
    leftover = site.model("llama").with_name(f".modeling_llama.py.0123456789abcdef{LEFTOVER}")
    leftover.write_bytes(b"half")
    swap_file = site.model("llama").with_name(".modeling_llama.py.swp")
    swap_file.write_bytes(b"")
    command(["bert"], transformers_path=site.path)
    assert not leftover.exists()
    assert swap_file.exists()


def test_temporary_files_never_look_like_modules(site: Site, catalog: Catalog) -> None:
    created = []

    class Watching(Disk):
        def create(self, path: Path) -> int:
            created.append(path)
            return super().create(path)

    execute(planned(site, catalog, "install"), disk=Watching())
    assert len(created) == len(MODELS)
    assert all(not path.name.endswith(".py") and path.parent == site.model(path.parent.name).parent for path in created)


def test_a_file_that_changes_between_plan_and_write_is_refused(site: Site, catalog: Catalog) -> None:
    plan = planned(site, catalog, "install")
    site.model("qwen3").write_bytes(site.model("qwen3").read_bytes() + b"# mine\n")
    before = hashes(site.path)
    with pytest.raises(OverlayError, match="changed by another process"):
        execute(plan)
    assert hashes(site.path) == before


def test_a_concurrent_write_is_detected_and_kept(site: Site, catalog: Catalog) -> None:
    before = hashes(site.path)

    class Shared(Disk):
        replaced = 0

        def replace(self, source: Path, target: Path) -> None:
            super().replace(source, target)
            self.replaced += 1
            if self.replaced == len(MODELS):
                site.model("bert").write_bytes(b"edited")

    with pytest.raises(OverlayError, match="does not contain what was written"):
        execute(planned(site, catalog, "install"), disk=Shared())
    after = hashes(site.path)
    assert [path for path in before if before[path] != after[path]] == ["transformers/models/bert/modeling_bert.py"]
    assert site.model("bert").read_bytes() == b"edited"


def test_a_failed_undo_is_reported(site: Site, catalog: Catalog) -> None:
    import errno

    class Broken(Disk):
        replaced = 0

        def replace(self, source: Path, target: Path) -> None:
            self.replaced += 1
            if self.replaced > 2:
                raise OSError(errno.EIO, "Input/output error")
            super().replace(source, target)

    with pytest.raises(OverlayError, match="could not be restored") as failed:
        execute(planned(site, catalog, "install"), disk=Broken())
    assert str(site.model("bert")) in "".join(failed.value.facts.values())
    assert set(states(site).values()) <= {Installed.YES.value, Installed.NO.value}
    uninstall(transformers_path=site.path)
    assert set(states(site).values()) == {"no"}


def test_files_that_remain_in_an_append_only_folder_are_named(site: Site, catalog: Catalog) -> None:
    """In an append-only folder, files can only be created. The error names the temporary files that remain."""
    import errno

    class AppendOnly(Disk):
        def replace(self, source: Path, target: Path) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(target))

        def remove(self, path: Path) -> None:
            if path.exists():
                raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    before = hashes(site.root)
    with pytest.raises(OverlayError, match="could not remove its temporary files") as failed:
        execute(planned(site, catalog, "install"), disk=AppendOnly())
    leftovers = sorted(str(path) for path in site.root.rglob("*.hf-rocm-tmp"))
    assert sorted(value for label, value in failed.value.facts.items() if label.startswith("left")) == leftovers != []
    assert "chattr -a" in (failed.value.hint or "")
    install(transformers_path=site.path)
    uninstall(transformers_path=site.path)
    assert hashes(site.root) == before, "the next run did not remove them"
