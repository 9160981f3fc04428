"""The real aiter's lookup finds the user's rows in the table that hf_rocm merged."""

from __future__ import annotations

import os
import subprocess
import sys

from hf_rocm.ops.aiter.tables import machine
from hf_rocm.ops.aiter.tables.columns import layout_of
from tests.aiter import standins
from tests.aiter.conftest import aiter_version
from tests.tools.tuning.conftest import row, table_text, write

LOOKUP = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import standins
standins.install()
from hf_rocm.ops.aiter import detect
assert not isinstance(detect.load(), str), detect.load()
from aiter.tuned_gemm import get_GEMM_A16W16_config
for bias in (False, True):
    print("found", get_GEMM_A16W16_config(8, 4096, 512, bias, "torch.bfloat16", "torch.bfloat16").get("kernelName"))
"""


def test_aiter_finds_the_users_rows(kernels, tmp_path):
    version = aiter_version()
    layout = layout_of(version)
    release = machine.installed()
    assert release is not None and release.version == version and release.layout == layout
    assert release.tuner is not None and release.tuner.name == "gemm_tuner.py"
    assert release.shipped
    rows = [row(layout, kernelName="mine"), row(layout, M=8, bias=True, kernelName="biased")]
    actual = write(tmp_path / "mine.csv", table_text(layout, *rows))
    before = actual.read_bytes()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOKUP, str(standins.HERE)],
        env={
            **os.environ,
            "AITER_CONFIG_GEMM_BF16": str(actual),
            "HF_ROCM_CACHE": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    result = [line.removeprefix("found ") for line in done.stdout.splitlines() if line.startswith("found ")]
    assert result == ["mine", "biased"], done.stdout + done.stderr
    assert actual.read_bytes() == before
    (merged,) = (tmp_path / "cache").rglob("merged-*.csv")
    assert merged.read_text().startswith(",".join(layout.tuned))
