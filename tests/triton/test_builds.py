"""Every kernel compiles for every AMD instruction set without a GPU, and its machine code has no known problem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_rocm.ops.triton.builds import ARCHITECTURES, SHARED_MEMORY, Build
from tests.amdgcn import one

ROOT = Path(__file__).resolve().parents[2]


def build_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts" / "build-kernels"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
# Other architectures have the same instruction sets.
@pytest.mark.parametrize("architecture", one.ARCHITECTURES)
def test_every_kernel_builds(architecture):
    done = build_kernels("--json", "--arch", architecture)
    assert done.stdout, done.stderr
    builds = json.loads(done.stdout)
    bad = [f"{build['kernel']} {build['form']}: {build['problems']}" for build in builds if build["problems"]]
    assert done.returncode == 0, bad
    assert {build["architecture"] for build in builds} == {architecture}
    assert all(build["vgprs"] and build["sgprs"] for build in builds), "the assembler's notes were not found"
    assert {"rms_norm", "act_and_mul", "rope", "matrix_vector"} <= {build["kernel"] for build in builds}


def test_build_kernels_prints_a_table_and_exits_with_zero():
    done = build_kernels("norm", "--arch", "gfx942", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["kernel", "arch", "warps", "VGPR"]
    assert any("gfx942" in line for line in lines) and "0 bad" in lines[-1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import build_kernels

    return build_kernels


def test_invalid_builds_are_refused(script, monkeypatch):
    with pytest.raises(script.ScriptError, match="TRITON_INTERPRET is set"):
        next(script._jobs([], None))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(script.ScriptError, match="there are no kernels in nosuch"):
        next(script._jobs(["nosuch"], None))


FACTS = {
    **dict.fromkeys(("spilled_vgprs", "spilled_sgprs", "scratch_bytes", "lds_bytes", "matrix_instructions"), 0),
    **{"kernel": "k", "form": "f", "architecture": "gfx942", "warps": 4, "lds_limit": 65536},
}


@pytest.fixture
def judged(script):
    def judge(*, matrix: bool = False, **result: int) -> tuple[str, ...]:
        return script._judged(SimpleNamespace(matrix=matrix), {**FACTS, **result}).problems

    return judge


def test_silent_problems_on_amd_gpus_are_reported(judged):
    assert judged() == () and judged(matrix=True, matrix_instructions=8) == ()
    assert "3 registers spilled" in judged(spilled_vgprs=3)[0]
    assert "16 bytes of scratch" in judged(scratch_bytes=16)[0]
    assert "shared memory" in judged(lds_bytes=65537)[0]
    assert judged(matrix=True) == ("no matrix instruction",)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_instruction_that_the_tests_cannot_execute_is_a_problem(script, architecture):
    """The problem is reported at build time, even if no case that CI runs reaches the instruction."""
    text = "\nk:\n\tv_add_f32_e32 v1, v2, v3\n\t{}\n\ts_endpgm\n\t.amdhsa_kernel k\n\t.end_amdhsa_kernel\n"
    assert script._unknown(text.format("s_nop 0"), architecture) == ()
    (problem,) = script._unknown(text.format("v_sin_and_cos_f32_e32 v1, v2"), architecture)
    assert "v_sin_and_cos_f32" in problem and architecture in problem
    judged = script._judged(SimpleNamespace(matrix=False), FACTS | {"architecture": architecture}, (problem,))
    assert judged.problems == (problem,)


def test_the_metadata_in_the_assembly_is_read(script):
    text = """
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], 0
\tv_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
    .private_segment_fixed_size: 8
    .sgpr_count:     21
    .sgpr_spill_count: 1
    .vgpr_count:     128
    .vgpr_spill_count: 2
"""
    facts = script._facts(SimpleNamespace(asm={"amdgcn": text}, metadata=SimpleNamespace(shared=1024)))
    assert facts == {
        "vgprs": 128,
        "sgprs": 21,
        "spilled_vgprs": 2,
        "spilled_sgprs": 1,
        "scratch_bytes": 8,
        "lds_bytes": 1024,
        "matrix_instructions": 2,
    }


def test_wave_sizes_and_lds_sizes_are_those_of_the_architectures():
    assert {name: lanes for name, lanes in ARCHITECTURES.items() if name.startswith("gfx9")} == dict.fromkeys(
        ("gfx90a", "gfx942", "gfx950"), 64
    )
    assert {lanes for name, lanes in ARCHITECTURES.items() if not name.startswith("gfx9")} == {32}
    assert {"gfx1150", "gfx1151", "gfx1200"} < set(ARCHITECTURES)
    assert SHARED_MEMORY == {"gfx950": 163840}
    assert Build(None, {}, {}).architectures == tuple(ARCHITECTURES)
