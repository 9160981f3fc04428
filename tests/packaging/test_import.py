"""`import hf_rocm` must be cheap, because every installed modeling file runs it."""

from __future__ import annotations

import json

import pytest

from tests.packaging.conftest import Run

# The limit in seconds; on slower machines, it is the time that importing asyncio takes.
LIMIT = 0.050
HEAVY = ("torch", "transformers", "accelerate", "aiter", "triton", "numpy", "typer", "rich")

TIMED = """
import json, sys, time
# process_time counts only this process, because others share the machine
began = time.process_time()
import {module}
seconds = time.process_time() - began
imported = [name for name in {heavy} if name in sys.modules]
began = time.process_time()
import asyncio
print(json.dumps([seconds, imported, time.process_time() - began]))
"""


@pytest.mark.parametrize("module", ["hf_rocm", "hf_rocm.overlay"])
def test_the_import_is_fast_and_imports_no_heavy_module(module: str, run: Run) -> None:
    seconds, standard = [], []
    # Take the fastest run, because other processes slow some runs down.
    for _ in range(7):
        result = run("-c", TIMED.format(module=module, heavy=HEAVY))
        assert result.returncode == 0, result.stderr
        duration, heavy, asyncio = json.loads(result.stdout)
        assert heavy == []
        seconds.append(duration)
        standard.append(asyncio)
    assert min(seconds) < max(LIMIT, min(standard)), (seconds, standard)


def test_check_version_imports_neither_torch_nor_transformers(run: Run) -> None:
    code = "import sys, hf_rocm.check_version as c; c.main([]); print([n for n in {} if n in sys.modules])"
    result = run("-c", code.format(HEAVY[:5]))
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


def test_every_public_name_exists(run: Run) -> None:
    result = run("-c", "import hf_rocm; print([name for name in hf_rocm.__all__ if not hasattr(hf_rocm, name)])")
    assert result.stdout.strip() == "[]", result.stderr


def test_dir_lists_every_public_name_once_and_no_imports(run: Run) -> None:
    code = "import hf_rocm, json; hf_rocm.explain; print(json.dumps([dir(hf_rocm), hf_rocm.__all__]))"
    listed, public = json.loads(run("-c", code).stdout)
    assert sorted(name for name in listed if not name.startswith("__")) == sorted(set(public) - {"__version__"})
    assert len(listed) == len(set(listed))
