"""A stand-in for any release of aiter: the files and tables that tuning reads, and a tuner that writes results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_rocm import options
from hf_rocm.ops.aiter.tables import machine
from hf_rocm.ops.aiter.tables.columns import Layout, layout_of
from hf_rocm.ops.aiter.tables.machine import Gpu, Release

MI300X = Gpu("gfx942", 304)

# Behaves like aiter's tuners, which read one file and write another. The file `behaviour` selects the outcome.
TUNER = """
import csv, os, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
behaviour = open(os.path.join(os.path.dirname(__file__), "behaviour")).read().split()
print("tuning", sys.argv[1:], os.environ.get("AITER_CONFIG_GEMM_BF16"), flush=True)
if "fails" in behaviour:
    sys.exit("RuntimeError: no GPU")
if "retries" in behaviour:
    for attempt in range(600):
        print("!Error when run GemmTuner process exitcode is 1", flush=True)
        time.sleep(0.1)
    open(os.path.join(os.path.dirname(__file__), "gave-up"), "w").close()
shapes = list(csv.DictReader(open(arguments["--input_file"])))
columns = COLUMNS
with open(arguments["--tuned_file"], "w") as out:
    out.write(",".join(columns).replace("tflops,bw", "tflops, bw") + "\\n")
    for number, shape in enumerate(shapes):
        if "some" in behaviour and number % 2:
            continue
        result = {"gfx": os.environ["GPU_ARCHS"], "cu_num": os.environ["CU_NUM"], "libtype": "hipblaslt",
                  "solidx": number, "splitK": 0, "us": 9.5, "soltimes": 9.5, "kernelName": "", "err_ratio": 0.0,
                  "tflops": 1.0, "bw": 1.0}
        out.write(",".join(str({**shape, **result}[name]) for name in columns) + "\\n")
        out.flush()
        if "hangs" in behaviour:
            time.sleep(600)
sys.exit("some" in behaviour)
"""


class FakeAiter(NamedTuple):
    """A fake package. site: the folder that contains it. behaviour: a file that selects the outcome of the tuner."""

    site: Path
    release: Release
    behaviour: Path


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Use a separate cache, and make sure that no table is active before and after the test."""
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    for name in ("AITER_CONFIG_GEMM_BF16", "GPU_ARCHS", "CU_NUM"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "cache"
    options.use_tuned_table(None)


@pytest.fixture
def fake_aiter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeAiter]:
    """Returns a function that puts an aiter of a given release on the path and simulates an MI300X."""

    def install(version: str, *shipped: str, models: dict[str, str] | None = None) -> FakeAiter:
        layout = layout_of(version)
        site = tmp_path / "site"
        for name in ("aiter/__init__.py", "aiter/jit/core.py", "aiter/ops/mha.py"):
            file = site / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("raise RuntimeError('ROCm version file not found')\n")
        write(site / "aiter/configs" / layout.table, table_text(layout, *shipped))
        for name, text in (models or {}).items():
            write(site / "aiter/configs/model_configs" / name, text)
        script = site / "aiter_meta" / layout.tuner
        write(script, TUNER.replace("COLUMNS", repr(layout.tuned)))
        write(script.parent / "behaviour", "")
        write(site / f"amd_aiter-{version}.dist-info/METADATA", f"Name: amd-aiter\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "aiter", raising=False)
        monkeypatch.setenv("GPU_ARCHS", MI300X.gfx)
        monkeypatch.setenv("CU_NUM", str(MI300X.units))
        release = machine.installed()
        assert release is not None and release.version == version, release
        return FakeAiter(site, release, script.parent / "behaviour")

    return install


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def row(layout: Layout, **changes: object) -> str:
    """Returns one row of this layout, for an MI300X unless overridden."""
    values: dict[str, object] = {
        "gfx": "gfx942",
        "cu_num": 304,
        "M": 8,
        "N": 4096,
        "K": 512,
        "bias": False,
        "dtype": "torch.bfloat16",
        "outdtype": "torch.bfloat16",
        "scaleAB": False,
        "bpreshuffle": False,
        "libtype": "asm",
        "solidx": 3,
        "splitK": 0,
        "us": 7.5,
        "soltimes": 7.5,
        "kernelName": "_ZN5aiter1kE",
        "err_ratio": 0.0,
        "tflops": 1.5,
        "bw": 20.25,
    }
    return ",".join(str({**values, **changes}[name]) for name in layout.tuned)


def table_text(layout: Layout, *rows: str) -> str:
    return "\n".join([",".join(layout.tuned), *rows]) + "\n"
