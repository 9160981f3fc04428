"""Concurrent checks on several ranks: one rank checks, the others use its result, and no rank waits for a killed
process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_rocm.ops import probe, probe_lock, probe_worker
from tests.distributed.launch import run_ranks, succeeded

# The rank that checks does not finish before the others have arrived.
RANK = """
import json, os, sys, time, warnings
from pathlib import Path
import torch
from hf_rocm import options
from hf_rocm.device import Device
from hf_rocm.ops import probe, probe_cases, probe_worker
meeting, result, world = Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["WORLD_SIZE"])

def send(request, timeout):
    (meeting / f"request-{os.getpid()}").touch()
    while len(list(meeting.glob("coming-*"))) < world:
        time.sleep(0.01)
    # Wait until the ranks that have touched their files have arrived.
    time.sleep(2.0)
    return result

probe_worker.send = send
probe_cases.kind = lambda operation, spec: (8, torch.bfloat16)
check = probe.checked("linear", "gemm", version=lambda: "1")
(meeting / f"coming-{os.environ['RANK']}").touch()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    print(json.dumps([check((), Device("cuda", True, "gfx942")), check((), Device("cuda", True, "gfx942"))]))
"""

HOLDER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("result", [None, "wrong by 3"])
def test_one_of_four_ranks_runs_the_check_and_all_use_its_result(tmp_path, result):
    cache = tmp_path / "cache"
    ranks = run_ranks(RANK, tmp_path, json.dumps(result), world=4, environ={"HF_ROCM_CACHE": str(cache)})
    expected = None if result is None else f"its check failed: {result}"
    assert [json.loads(rank.out) for rank in succeeded(ranks)] == [[expected] * 2] * 4
    assert len(list(tmp_path.glob("request-*"))) == 1
    cached = list((cache / "probes").glob("*")) if result is None else []
    assert [file.suffix for file in cached] == [".json"] * (result is None)
    assert len(list((cache / "turns").iterdir())) == (result is not None), "the waiting ranks did not get the failure"


@pytest.fixture
def holder(tmp_path):
    lock = tmp_path / "x.lock"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield lock, process
    process.kill()
    process.communicate()


def test_the_lock_of_a_killed_process_is_released(holder):
    lock, process = holder
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with probe_lock.turn(lock, timeout=0, kernel="a kernel") as turn:
        assert turn.lock is not None and turn.failure is None
    assert not lock.exists()


def test_the_wait_is_limited_and_reported(holder, monkeypatch, caplog):
    monkeypatch.setattr(probe_lock, "FIRST_MESSAGE", 0.05)
    with probe_lock.turn(holder[0], timeout=0.3, kernel="aiter's gemm") as turn:
        assert turn.lock is None and turn.waited and turn.failure is None
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for another process, which is building and checking aiter's gemm"
    ]
    assert holder[0].exists()


def test_an_earlier_failure_is_checked_again(tmp_path):
    lock = tmp_path / "x.lock"
    with probe_lock.turn(lock, timeout=0, kernel="a kernel") as turn:
        turn.fail("wrong by 3")
    assert lock.exists()
    with probe_lock.turn(lock, timeout=0, kernel="a kernel") as turn:
        assert turn.failure is None
    assert not lock.exists()


def test_an_unwritable_cache_is_not_used():
    with probe_lock.turn(Path("/dev/null/x.lock"), timeout=10, kernel="a kernel") as turn:
        assert turn.lock is None and not turn.waited


def test_a_requested_check_runs_again_even_if_it_passed(tmp_path, monkeypatch):
    from hf_rocm import options

    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    requests = []

    def once(refresh):
        with options.override(refresh=refresh):
            probe.forget()
            assert probe._once(("linear", "aiter", "gemm"), "key", lambda: requests.append(1), on_disk=True) is None
        return len(requests)

    assert [once(False), once(False), once(True)] == [1, 1, 2]
    probe.forget()


@pytest.mark.parametrize(("rank", "starts"), [("0", True), ("1", False)])
def test_the_first_rank_of_a_machine_starts_the_child_in_advance(rank, starts, monkeypatch, tmp_path):
    import torch

    calls: list[float] = []
    monkeypatch.setattr(probe_worker, "start", lambda device: calls.append(time.time()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "HF_ROCM_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    probe.ahead()
    assert bool(calls) == starts
