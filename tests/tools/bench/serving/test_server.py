"""The server as a child process: it starts and ends with its process group, and failures name their cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

from hf_rocm.errors import OptionError
from hf_rocm.tools.bench import children
from hf_rocm.tools.bench.serving import server
from hf_rocm.tools.bench.serving.server import ServeError, serving
from tests.tools.bench.serving.conftest import ended


def start(folder, *, timeout=30.0, arguments=()):
    return serving("stock", arguments, folder, gpu=False, timeout=timeout, progress=lambda text: None)


def test_the_server_listens_and_ends_with_its_process_group(stubs, tmp_path):
    stubs(stock={"child": str(tmp_path / "pid")})
    with start(tmp_path / "server") as running:
        assert running.port > 0
        running.check("now")
        grandchild = int((tmp_path / "pid").read_text())
        assert not ended(grandchild, within=0.1)
    assert running.process.returncode is not None
    assert ended(grandchild)


def test_an_exception_in_the_block_ends_the_server(stubs, tmp_path):
    with pytest.raises(KeyboardInterrupt), start(tmp_path / "server") as running:
        raise KeyboardInterrupt
    assert running.process.returncode is not None


def test_a_server_that_ignores_requests_to_end_is_killed(monkeypatch, tmp_path):
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('Uvicorn running on "
    monkeypatch.setitem(server.CODE, "stock", f"{stubborn}http://127.0.0.1:9', flush=True)\ntime.sleep(600)")
    monkeypatch.setattr(server, "_GRACE", 0.2)
    with start(tmp_path / "server") as running:
        assert running.port == 9
    assert running.process.returncode == -signal.SIGKILL


def test_a_model_that_does_not_load_is_an_error_with_the_last_lines(monkeypatch, tmp_path):
    monkeypatch.setitem(server.CODE, "stock", "print('OSError: no such model')\nsys.exit(3)")
    with pytest.raises(ServeError) as error, start(tmp_path / "server"):
        pytest.fail("the server started")
    assert error.value.message == "the stock server ended with exit code 3 while it was loading the model"
    assert error.value.facts == {"last lines": "OSError: no such model"}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "none"),
        ("a\n\nb\n c \nd", "b / c / d"),
        ("Traceback\nValueError: no\nb\nc\n", "ValueError: no / b / c"),
        ("Error: No such option: --x\na\nb\nc\nd", "Error: No such option: --x / … / b / c / d"),
        ("torch.OutOfMemoryError: no memory\na\nb\nc", "torch.OutOfMemoryError: no memory / … / a / b / c"),
        ("no errors: none\na\nb\nc", "a / b / c"),
    ],
)
def test_the_last_lines_name_an_error_above_them(log, expected, tmp_path):
    (tmp_path / "log").write_text(log)
    assert children.tail(tmp_path / "log") == expected


def test_a_killed_server_names_the_signal(stubs, tmp_path):
    with pytest.raises(ServeError) as error, start(tmp_path / "server") as running:
        running.process.kill()
        running.process.wait()
        running.check("during the benchmark")
    assert error.value.message == "the stock server was killed by signal 9 (SIGKILL) during the benchmark"


def test_a_server_that_does_not_start_in_time_is_ended(monkeypatch, tmp_path):
    monkeypatch.setitem(server.CODE, "stock", "import time\nprint('loading', flush=True)\ntime.sleep(600)")
    pids = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pids.append(popen(*a, **k)) or pids[-1])
    with pytest.raises(ServeError) as error, start(tmp_path / "server", timeout=0.5):
        pytest.fail("the server started")
    assert (
        "did not start in 0.5 s" in error.value.message and error.value.hint == "allow more time with --start-timeout"
    )
    assert pids[0].returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="not run: needs Linux's parent-death signal")
def test_the_server_ends_when_the_command_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys, time\nsys.path[:] = " + repr(sys.path) + "\n"
         "from hf_rocm.tools.bench import children\n"
         "child = subprocess.Popen(children.command('import time; print(os.getpid(), flush=True); time.sleep(600)'))\n"
         "time.sleep(600)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert ended(child)


def test_the_stock_server_cannot_import_hf_rocm(monkeypatch, tmp_path):
    code = server.CODE["stock"].split("sys.argv")[0]
    result = subprocess.run(children.command(f"{code}\nimport hf_rocm"), capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in result.stderr


def test_a_release_without_completions_is_refused(monkeypatch):
    existing = find_spec("json")
    monkeypatch.setattr(server, "find_spec", lambda name: None if name.startswith("transformers.cli") else existing)
    with pytest.raises(OptionError, match="has no /v1/completions"):
        server.check()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(OptionError) as error:
        server.check()
    assert error.value.facts == {"missing": ", ".join(server.NEEDS)}

    def absent(name):
        raise ModuleNotFoundError("No module named 'requests'")

    monkeypatch.setattr(server, "find_spec", lambda name: find_spec("json"))
    monkeypatch.setattr(server, "import_module", absent)
    with pytest.raises(OptionError) as error:
        server.check()
    assert error.value.facts == {"transformers error": "No module named 'requests'"}
