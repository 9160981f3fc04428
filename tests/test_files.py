"""Files are replaced atomically, FIFOs and devices are written in place, and waiting for a lock has a time limit."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_rocm import files

HOLDER = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("content", ["text ∑\n", b"\x00\xff"])
def test_a_file_is_written_as_a_whole_with_the_permissions_of_the_umask(tmp_path, content):
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "file", content)
    finally:
        os.umask(before)
    file = tmp_path / "file"
    assert file.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [path.name for path in file.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("before", [0o600, 0o644, 0o664])
def test_an_output_keeps_the_permissions_of_the_file_that_it_replaces(tmp_path, before):
    file = tmp_path / "result.json"
    file.write_text("old")
    file.chmod(before)
    during = []
    with files.output(file) as temporary:
        during.append(stat.S_IMODE(temporary.stat().st_mode))
        temporary.write_text("new")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", before)
    assert during == [0o600] and [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_new_output_gets_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_output(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root")
def test_an_output_keeps_its_owner(tmp_path):
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 4711, 4712)
    files.write_output(tmp_path / "file", "text")
    status = (tmp_path / "file").stat()
    assert (status.st_uid, status.st_gid) == (4711, 4712)


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_is_written_to_the_target_of_a_link(tmp_path, exists):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to("folder/target")
    files.write_output(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and list(target.parent.iterdir()) == [target]


def test_an_output_is_written_into_a_fifo(tmp_path):
    fifo, content = tmp_path / "fifo", os.urandom(1 << 20)
    os.mkfifo(fifo)
    received = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()))
    reader.start()
    files.write_output(fifo, content)
    reader.join(timeout=30)
    assert received == [content] and stat.S_ISFIFO(fifo.stat().st_mode)


def test_an_output_does_not_replace_a_device(tmp_path):
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("wb").close()
    except PermissionError:
        device = Path("/dev/null")
    before = device.stat()
    files.write_output(device, "text")
    assert stat.S_ISCHR(device.stat().st_mode) and device.stat().st_ino == before.st_ino
    with pytest.raises(OSError, match="No space left"):
        files.write_output(Path("/dev/full"), "text")


def test_an_output_to_stdout_is_appended(tmp_path):
    code = "import sys; from pathlib import Path; from hf_rocm import files; print('before', flush=True)\n"
    code += "files.write_output(Path('/dev/stdout'), 'result\\n'); print('after')"
    with (tmp_path / "out").open("ab") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nresult\nafter\n"


@pytest.mark.parametrize("path", ["", "folder", "missing/file", "file/below", "loop"])
def test_an_unwritable_output_is_refused_and_nothing_is_created(tmp_path, path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    for call in (files.check_output, lambda place: files.write_output(place, "text")):
        with pytest.raises(OSError, match=r"."):
            call(tmp_path / path if path else Path())
    assert sorted(tmp_path.rglob("*")) == before
    if path == "missing/file":
        files.check_output(tmp_path / path, parents=True)
        with pytest.raises(NotADirectoryError):
            files.check_output(tmp_path / "file" / "a" / "b", parents=True)


def test_a_block_device_is_refused_as_output(tmp_path, monkeypatch):
    status = os.stat_result((stat.S_IFBLK | 0o660, *(0,) * 9))
    monkeypatch.setattr(files, "_status", lambda path: status)
    with pytest.raises(OSError, match="a disk or a socket"):
        files.check_output(tmp_path / "disk")


@pytest.mark.parametrize("method", ["write_bytes", "replace"])
def test_a_failure_leaves_the_old_content_and_no_temporary_file(tmp_path, monkeypatch, method):
    files.write(tmp_path / "file", "old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"pathlib.Path.{method}", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_the_content_is_synced_before_the_file_is_replaced(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(os.pread(descriptor, 9, 0)))
    files.write(tmp_path / "file", "content")
    assert calls == [b"content"]


def test_a_lock_is_refused_until_its_process_ends(tmp_path):
    (tmp_path / "lock").touch()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "ready\n"
    descriptor = os.open(tmp_path / "lock", os.O_RDONLY)
    try:
        assert files.lock(descriptor) is False
        holder.kill()
        holder.communicate()
        assert files.poll(lambda: files.lock(descriptor) or None, timeout=30) is True
    finally:
        os.close(descriptor)


def test_a_file_system_without_locks_is_an_error(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks"):
        files.lock(0)


def test_polling_tries_at_least_once_and_reports_the_waiting_time(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(files.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    assert files.poll(lambda: "at once", timeout=0) == "at once"
    answers, waits = iter([None, None, False]), []
    assert files.poll(lambda: next(answers), timeout=5, waiting=waits.append) is False
    assert waits == [1.0, 2.0]
    assert files.poll(lambda: None, timeout=3) is None
