"""The installer's lock: one writer at a time, no lock file inside transformers, no stale lock."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.commands import status
from hf_rocm.overlay.lock import exclusive
from tests.overlay.conftest import Site, hashes


def hold(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_the_lock_leaves_no_files(site: Site) -> None:
    before = hashes(site.path)
    with exclusive(site.root) as notices:
        assert notices == []
    assert hashes(site.path) == before


def test_a_second_writer_waits_and_then_raises_an_error(site: Site) -> None:
    descriptor = hold(site.root)
    try:
        with pytest.raises(OverlayError, match="another installer") as refused, exclusive(site.root, timeout=0.1):
            pass
        assert refused.value.facts["file"] == str(site.root)
    finally:
        os.close(descriptor)
    with exclusive(site.root, timeout=0.1):
        pass


@pytest.mark.parametrize("settings", ["home = /usr\nuv = 0.9.0\n", "home = /usr\n"])
def test_uvs_lock_is_used_if_uv_manages_the_environment(site: Site, settings: str) -> None:
    (site.path / "pyvenv.cfg").write_text(settings)
    lock = site.path / ".lock"
    with exclusive(site.root):
        assert lock.exists() is ("uv" in settings)
    if lock.exists():
        descriptor = hold(lock)
        try:
            with pytest.raises(OverlayError, match="another installer"), exclusive(site.root, timeout=0.1):
                pass
        finally:
            os.close(descriptor)


def test_a_file_system_without_locks_causes_a_notice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with exclusive(site.root) as notices:
        assert len(notices) == 1 and "without locks" in notices[0]


def test_concurrent_installers_end_in_the_result_of_one_of_them(site: Site) -> None:
    command = "from hf_rocm.overlay.commands import {0}; {0}(transformers_path={1!r})[0].check()"
    running = [
        subprocess.Popen([sys.executable, "-c", command.format(verb, str(site.path))], stderr=subprocess.PIPE)
        for verb in ("install", "uninstall", "install", "install")
    ]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    states = {state.installed.value for state in status(transformers_path=site.path)[1]}
    assert states in ({"yes"}, {"no"})
    assert not [path for path in site.path.rglob("*hf-rocm-tmp*")]
