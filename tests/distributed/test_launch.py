"""The test harness: its results for ranks that end, hang, or leave processes behind."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks, torchrun

pytestmark = pytest.mark.slow

PLAIN = """
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1], os.environ["EXTRA"], flush=True)
if rank == 1:
    print("on stderr", file=sys.stderr, flush=True)
    time.sleep(600)
"""

ORPHAN = """
import os, subprocess, sys
if os.environ["RANK"] == "1":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    sys.exit(3)
"""


def test_plain_processes_report_output_and_exit_code():
    first, second = run_ranks(PLAIN, "word", environ=lambda rank: {"EXTRA": f"extra{rank}"}, timeout=8)
    assert (first.code, first.out) == (0, "rank 0 of 2 word extra0\n")
    assert (second.code, second.error) == (None, "on stderr\n")
    assert second.seconds >= 7.9


def test_processes_that_torchrun_leaves_behind_are_listed():
    result = torchrun(ORPHAN, timeout=120)
    assert result.code == 1, result.log
    assert "exitcode:3" in result.log.replace(" ", "")
    assert len(result.left) == 1 and "time.sleep(600)" in result.left[0]
