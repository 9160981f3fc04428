"""Concurrent installers, uninstallers, readers and package managers, on file systems with and without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import pid_lock as claims
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.commands import install, status, uninstall
from hf_rocm.overlay.install import LEFTOVER
from hf_rocm.overlay.lock import CLAIM, exclusive
from tests.overlay.conftest import MODELS, Site, hashes
from tests.overlay.promises import faults
from tests.overlay.promises.world import VERSION, Environment

Farm = Callable[[str], Site]

# every process runs several commands, so that the commands of all processes overlap
BUSY = """
import sys
from hf_rocm.overlay.catalog import load
from hf_rocm.overlay.commands import install, uninstall
catalog = load()
print("ready", flush=True)
sys.stdin.readline()
for round in range(int(sys.argv[2])):
    for command in (install, uninstall) if (round + int(sys.argv[3])) % 2 else (uninstall, install):
        command(transformers_path=sys.argv[1], catalog=catalog)[0].check()
"""
# reads a file while it changes; at any time, the file is valid Python with a complete block or without one
READER = """
import sys
stock, installed = [open(path, "rb").read() for path in sys.argv[2:4]]
print("ready", flush=True)
sys.stdin.readline()
seen = set()
for number in range(int(sys.argv[4])):
    data = open(sys.argv[1], "rb").read()
    if data not in (stock, installed):
        sys.exit(f"torn: {len(data)} bytes")
    if number % 100 == 0:
        compile(data, sys.argv[1], "exec")
    seen.add(len(data))
print(len(seen))
"""


HOLDER = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.readline()
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
    return process


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out


def signal_start(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def states(site: Site) -> set[str]:
    return {state.installed.value for state in status(transformers_path=site.path)[1]}


def test_10_and_11_concurrent_writers_are_serialised_and_readers_see_whole_files(farm: Farm, tmp_path: Path) -> None:
    site, stock = farm("one"), farm("stock")
    install(transformers_path=site.path)
    installed = tmp_path / "installed.py"
    installed.write_bytes(site.model("llama").read_bytes())
    writers = [start(BUSY, site.path, 8, number) for number in range(4)]
    readers = [start(READER, site.model("llama"), stock.model("llama"), installed, 20_000) for _ in range(2)]
    signal_start(*readers, *writers)
    for process in writers:
        finish(process)
    seen = [int(finish(process)) for process in readers]
    assert max(seen) == 2, "only one state was seen"
    assert states(site) in ({"yes"}, {"no"})
    assert not list(site.path.rglob(f"*{LEFTOVER}"))
    uninstall(transformers_path=site.path)
    assert hashes(site.path) == hashes(stock.path)


def test_10_a_command_waits_for_a_lock_unless_its_owner_is_dead(farm: Farm) -> None:
    site = farm("one")
    holder = start(HOLDER, site.root)
    with pytest.raises(OverlayError, match="another installer"), exclusive(site.root, timeout=0.1):
        pass
    began = time.monotonic()
    threading.Timer(0.3, holder.kill).start()
    install(["llama"], transformers_path=site.path)
    assert 0.3 <= time.monotonic() - began < 30
    holder.communicate(timeout=10)
    assert holder.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_10_commands_run_concurrently_with_a_real_uv(environments: Callable[..., Environment]) -> None:
    environment = environments("one", "uv", "hardlink")
    site, stock = environment.site, hashes(environment.site.root)
    for _ in range(3):
        reinstalling = environment.start_install(VERSION, "--reinstall")
        busy = start(BUSY, site.path, 2, 1)
        signal_start(busy)
        _, errors = reinstalling.communicate(timeout=60)
        assert reinstalling.returncode == 0, errors
        # Commands fail if they run at a moment when transformers is absent.
        busy.communicate(timeout=60)
        assert busy.returncode in (0, 1)
        assert not list(site.path.rglob(f"*{LEFTOVER}"))
        environment.install(VERSION, "--reinstall")
        assert hashes(site.root) == stock


def test_10_uv_waits_for_the_lock(environments: Callable[..., Environment]) -> None:
    environment = environments("one", "uv")
    with exclusive(environment.site.root):
        waiting = environment.start_install(VERSION, "--reinstall")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1.5)
    _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, errors


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("without_locks")
def test_22_without_locks_a_pid_file_is_used_with_a_notice(farm: Farm, catalog: Catalog) -> None:
    site = farm("one")
    before = hashes(site.path)
    with exclusive(site.root) as notices:
        assert len(notices) == 1 and "without locks" in notices[0] and CLAIM in notices[0]
        with pytest.raises(OverlayError, match="another installer") as refused, exclusive(site.root, timeout=0.1):
            pass
        assert f"process {os.getpid()}" in refused.value.facts["found"]
    assert hashes(site.path) == before, "the PID file remains, or was inside the package"
    _, reported = install(["llama"], transformers_path=site.path, catalog=catalog)
    assert reported == notices


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("content", ["dead process", "other start", "other host, long ago", "nonsense, long ago"])
def test_22_a_stale_pid_file_never_blocks(farm: Farm, content: str) -> None:
    site = farm("one")
    claim = site.path / f".transformers{CLAIM}"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    claim.write_text(
        {
            "dead process": f"{socket.gethostname()}\n{dead.pid}\n1\n",
            "other start": f"{socket.gethostname()}\n{os.getpid()}\n1\n",
        }.get(content, "elsewhere\n1\n1\n" if "host" in content else "?")
    )
    if "long ago" in content:
        past = time.time() - claims.OLD - 1
        os.utime(claim, (past, past))
    with exclusive(site.root, timeout=0.5):
        assert str(os.getpid()) in claim.read_text()
    assert not claim.exists()


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("host", ["elsewhere", "here, without a start time"])
def test_22_a_fresh_pid_file_of_another_host_blocks(farm: Farm, host: str) -> None:
    """Without /proc, the writer of a PID file on this host can't be identified either."""
    site = farm("one")
    claim = site.path / f".transformers{CLAIM}"
    host, written = ("elsewhere", "1\n1\n") if host == "elsewhere" else (socket.gethostname(), "1\n\n")
    claim.write_text(f"{host}\n{written}")
    with pytest.raises(OverlayError, match="another installer") as refused, exclusive(site.root, timeout=0.1):
        pass
    assert host in refused.value.facts["found"] and "remove this file" in (refused.value.hint or "")
    assert claim.read_text() == f"{host}\n{written}"


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_22_a_system_without_flock_uses_a_pid_file(farm: Farm, error: str, tmp_path: Path) -> None:
    faults.require_injection()
    site = farm("one")
    code = "import sys; from hf_rocm.overlay.commands import install; print(install(transformers_path=sys.argv[1])[1])"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=flock", "-e", f"inject=flock:error={error}"]
    result = subprocess.run(
        [*command, sys.executable, "-c", code, str(site.path)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "without locks" in result.stdout
    assert states(site) == {"yes"} and len(MODELS) == len(status(transformers_path=site.path)[1])
    assert not list(site.path.rglob(f"*{CLAIM}*"))
