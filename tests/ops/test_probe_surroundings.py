"""First-use checks in restricted environments run without what is missing, or disable the kernel with a reason."""

from __future__ import annotations

import errno
import os
import pwd
import resource
import select
import signal
import stat
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch

from hf_rocm import architectures, options
from hf_rocm.device import Device
from hf_rocm.ops import probe, probe_cache, probe_child, probe_lock, probe_worker
from hf_rocm.ops.specs.pointwise import NormSpec

CPU = Device("cpu", rocm=False)
SPEC = NormSpec(
    dtype=torch.float32, weight_dtype=torch.float32, device=torch.device("cpu"), dim=64, one_plus=False, grad=False
)
CHECK = probe.checked("rms_norm", "F.rms_norm", tier="torch", version=lambda: "1")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    probe_worker.stop()
    probe.forget()
    yield
    probe_worker.stop()
    probe.forget()


@pytest.fixture
def child_requests(monkeypatch):
    """Record the requests to the child process. All of them succeed."""
    requests = []
    monkeypatch.setattr(probe_worker, "send", lambda request, timeout: requests.append(request))
    return requests


def passes_twice(child_requests):
    """Check that a pass is reused in this process and is not stored on disk: after `forget`, the check runs again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CHECK(SPEC, CPU) is None and CHECK(SPEC, CPU) is None
        assert len(child_requests) == 1
        probe.forget()
        assert CHECK(SPEC, CPU) is None
        assert len(child_requests) == 2, "a pass was cached although the cache can't be used"
        probe.ahead()


@pytest.fixture
def nobody():
    """Switch from root to a user who can't access pytest's folders, as in a container with an arbitrary uid."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


@pytest.mark.parametrize("inner", ["", "cache"])
def test_an_inaccessible_cache_is_not_used(inner, child_requests, monkeypatch, tmp_path, nobody):
    if os.geteuid() != 65534:
        (tmp_path / "locked").mkdir(mode=0)
        monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "locked" / inner))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(probe_worker, "start", lambda device: None)
    passes_twice(child_requests)


def test_without_a_home_folder_nothing_is_cached(child_requests, monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "HF_ROCM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(probe_worker, "start", lambda device: None)
    with pytest.raises(OSError, match="home folder"):
        options.cache_folder()
    passes_twice(child_requests)


def test_without_a_temporary_folder_checks_still_pass(monkeypatch):
    def none(*arguments, **keywords):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", none)
    assert CHECK(SPEC, CPU) is None and probe_worker._worker.errors is not None
    probe_worker.stop()
    probe.forget()
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with options.override(refresh=True):
        assert CHECK(SPEC, CPU) is None and probe_worker._worker.errors is None
        probe_worker._worker.process.kill()
        assert "signal 9" in probe_worker._worker._ended(began=True).reason


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENOENT])
def test_if_no_process_can_be_started_the_kernel_is_refused_with_a_warning(number, monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.warns(RuntimeWarning, match="won't use torch's F.rms_norm for float32 in this process") as caught:
        reason = CHECK(SPEC, CPU)
    assert os.strerror(number) in reason and len(caught) == 1
    assert CHECK(SPEC, CPU) == reason
    assert probe_worker._worker is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    probe.ahead()


def test_if_no_file_can_be_opened_the_kernel_is_refused_with_a_warning():
    """The process is at its limit of open files, so no pipe can be opened until the limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = min(set(range(3, 4096)) - {int(file.name) for file in Path("/proc/self/fd").iterdir()})
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.warns(RuntimeWarning, match="no process could be started to check it: Too many open files"):
            assert CHECK(SPEC, CPU) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    probe.forget()
    assert CHECK(SPEC, CPU) is None


def test_a_check_passes_in_a_process_with_thousands_of_open_files(monkeypatch):
    """select.select fails for descriptors of 1024 and above."""

    def refuse(*arguments):
        raise ValueError("filedescriptor out of range in select()")

    monkeypatch.setattr(select, "select", refuse)
    assert CHECK(SPEC, CPU) is None


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 0.5])
def test_time_limits_of_any_size_work(timeout, monkeypatch):
    limits = []
    monkeypatch.setattr(signal, "alarm", limits.append)
    probe_child._alarm(timeout)
    assert 0 < limits[0] < 2**31
    # This raises an error if the system doesn't support such a long time.
    signal.setitimer(signal.ITIMER_REAL, limits[0])
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_without_a_time_limit_a_check_passes():
    with options.override(probe_timeout=float("inf")):
        assert CHECK(SPEC, CPU) is None


def test_a_truncated_reply_means_that_the_child_exited(monkeypatch):
    monkeypatch.setattr(probe_worker, "_START", "print('{{\"rea', end='', flush=True); raise SystemExit(7)")
    with pytest.warns(RuntimeWarning, match="exit code 7"):
        assert CHECK(SPEC, CPU) is not None


def passed_file(tmp_path) -> Path:
    (file,) = (tmp_path / "cache" / "probes").iterdir()
    return file


@pytest.fixture
def stored_pass(child_requests, tmp_path):
    """Store a passed check on disk, and check that it is read back. Returns its file."""
    assert CHECK(SPEC, CPU) is None
    probe.forget()
    assert CHECK(SPEC, CPU) is None and len(child_requests) == 1
    probe.forget()
    return passed_file(tmp_path)


def emptied(file):
    file.write_text("")


def of_another_check(file):
    file.write_text(file.read_text().replace("F.rms_norm", "F.layer_norm"))


def writable_by_others(file):
    file.chmod(0o666)


def of_another_user(file):
    os.chown(file, 4711, 4711)


def linked(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def not_text(file):
    file.write_bytes(b"\xff")


def a_fifo(file):
    file.unlink()
    os.mkfifo(file)


FORGED = [emptied, of_another_check, writable_by_others, of_another_user, linked, not_text, a_fifo]


@pytest.mark.parametrize("forge", FORGED)
def test_an_invalid_or_untrusted_pass_is_ignored(forge, stored_pass, child_requests):
    if forge is of_another_user and os.geteuid() != 0:
        pytest.skip("not run: needs root")
    forge(stored_pass)
    assert CHECK(SPEC, CPU) is None
    assert len(child_requests) == 2
    probe.forget()
    assert CHECK(SPEC, CPU) is None
    assert len(child_requests) == 2, "the permissions were not corrected"


def test_a_pass_is_only_writable_by_its_owner_with_any_umask(child_requests, tmp_path):
    before = os.umask(0)
    try:
        assert CHECK(SPEC, CPU) is None
    finally:
        os.umask(before)
    assert stat.S_IMODE(passed_file(tmp_path).stat().st_mode) == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root")
def test_checks_by_root_are_used_by_all_users(child_requests, monkeypatch, tmp_path):
    """The cache may be part of a container image that root built.

    Root's files are trusted; other users' files are not. A user who finds no trusted file stores a separate one in the
    same folder.
    """
    tmp_path.chmod(0o777)
    assert CHECK(SPEC, CPU) is None and len(child_requests) == 1
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    probe.forget()
    assert CHECK(SPEC, CPU) is None and len(child_requests) == 1
    os.chown(passed_file(tmp_path), 4712, 4712)
    probe.forget()
    assert CHECK(SPEC, CPU) is None and len(child_requests) == 2
    names = [file.stem.rpartition("-")[2] for file in (tmp_path / "cache" / "probes").iterdir()]
    assert sorted(names) == ["0", "4711"]


@pytest.mark.parametrize("fact", ["driver", "units", "arch"])
def test_another_driver_or_gpu_is_checked_again(fact, stored_pass, child_requests, monkeypatch):
    device = CPU
    if fact == "driver":
        monkeypatch.setattr(probe_cache, "_driver", lambda: "6.99")
    elif fact == "units":
        device = Device("cpu", rocm=False, units=7)
    else:
        device = Device("cpu", rocm=False, arch="gfx942")
    assert CHECK(SPEC, device) is None
    assert len(child_requests) == 2


def test_the_driver_is_identified_by_the_kernel_release_and_its_version(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("6.12.12\n")
    monkeypatch.setattr(architectures, "DRIVER", str(tmp_path / "version"))
    probe_cache._driver.cache_clear()
    assert probe_cache._driver() == f"{os.uname().release} 6.12.12"
    probe_cache._driver.cache_clear()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_links_to_another_file_does_not_change_it(link, tmp_path):
    precious, lock = tmp_path / "thesis.tex", tmp_path / "x.lock"
    precious.write_text("precious")
    link(precious, lock)
    with probe_lock.turn(lock, timeout=5, kernel="a kernel") as turn:
        assert turn.lock is None and not turn.waited
        turn.fail("wrong by 3")
    assert precious.read_text() == "precious" and lock.exists()


def test_a_lock_of_another_user_is_not_read(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("not run: needs root")
    lock = tmp_path / "x.lock"
    lock.touch()
    os.chown(lock, 4711, 4711)
    began = time.monotonic()
    with probe_lock.turn(lock, timeout=60, kernel="a kernel") as turn:
        assert turn.lock is None and turn.failure is None
    assert time.monotonic() - began < 30
