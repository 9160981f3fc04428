"""A failure on one rank ends the job without a hang. Its cause is logged, and no process remains."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
import transformers

import hf_rocm
from tests.distributed.launch import run_ranks, torchrun

SCRIPT = Path(__file__).with_name("failing_ranks.py")
# Seconds for a run, which imports transformers; a hang takes longer.
TIMEOUT = 240

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("two"), heads=4, groups=2)


def save(folder, *, heads, groups):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=8 * heads,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=groups,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def log_of_failure(fault, checkpoint, extra):
    """The log of torchrun for a job that failed within the time limit and left no process behind."""
    result = torchrun(SCRIPT, fault, checkpoint, extra, timeout=TIMEOUT)
    ended = time.time()
    assert result.code not in (0, None), result.log
    assert not result.left
    # a rank that doesn't depend on the killed one may finish before torchrun ends it
    assert fault == "killed" or "loaded" not in result.out.split()
    began = max(float(actual) for actual in re.findall(r"(?:loading|dying) ([\d.]+)", result.out))
    print(f"{fault}: {ended - began:.1f} s from the load to the end, {result.seconds:.1f} s in all")
    return result.log


def modified_copy(folder: Path) -> Path:
    """Copy hf_rocm to `folder` and modify the overlays of llama. Returns the folder."""
    package = Path(hf_rocm.__file__).parent
    shutil.copytree(package, folder / "hf_rocm", ignore=shutil.ignore_patterns("__pycache__"))
    overlays = folder / "hf_rocm" / "_overlays"
    # In a checkout, the overlays are next to the package.
    if not overlays.is_dir():
        shutil.copytree(package.parent / "overlays", overlays)
    for file in overlays.glob("transformers-*/models/llama/modeling_llama.py"):
        file.write_text(file.read_text() + "\n# edited\n")
    return folder


def test_a_rank_that_is_killed_while_it_loads_is_reported(checkpoint, tmp_path):
    log = log_of_failure("killed", checkpoint, tmp_path)
    assert "Signal 9 (SIGKILL)" in log and "rank" in log


def test_a_rank_with_other_overlays_is_named(checkpoint, tmp_path):
    log = log_of_failure("overlays", checkpoint, modified_copy(tmp_path))
    assert log.count("RankError: the ranks would not run the same model; they differ in: overlay of llama\n"), log
    assert re.search(r"overlay of llama  \w{12} on rank 0 \(.+\); \w{12} on rank 1 \(", log)
    assert "hf-rocm install-overlays" in log


def test_a_rank_without_aiter_is_named(checkpoint, tmp_path):
    for module in ("__init__.py", "jit/core.py", "ops/mha.py"):
        file = tmp_path / "aiter" / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    metadata = tmp_path / "amd_aiter-99.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 99.9\n")
    log = log_of_failure("aiter", checkpoint, tmp_path)
    assert "they differ in: aiter\n" in log, log
    assert re.search(r"aiter  amd-aiter 99\.9 on rank 0 \(.+\); (not installed|amd-aiter .+) on rank 1 \(", log)


def test_heads_that_cannot_be_divided_are_refused(tmp_path):
    log = log_of_failure("heads", save(tmp_path / "three", heads=6, groups=3), tmp_path)
    assert log.count("RankError: the attention heads can't be divided among 2 ranks: 3 (num_key_value_heads)\n"), log
    assert "sizes that fit       1, 3" in log


def test_a_rank_that_fails_before_it_loads_is_reported(checkpoint, tmp_path):
    log = log_of_failure("raises", checkpoint, tmp_path)
    words = (
        r"RankError: rank 1 \(.+\) failed before the model was loaded: ValueError: this node's driver does not respond"
    )
    assert re.search(words, log), log
    assert "Traceback" in log and "in broken" in log


@pytest.mark.parametrize("absent", [0, 1])
def test_without_torchrun_a_missing_rank_is_named(checkpoint, absent):
    environ = {"HF_ROCM_RANKS_TIMEOUT": "2"}
    # only the other rank is started
    (result,) = run_ranks(SCRIPT, "none", checkpoint, "", environ=environ, ranks=[1 - absent], timeout=TIMEOUT)
    assert result.code == 1, result.log
    assert f"RankError: rank {absent} did not join the other ranks to load the model" in result.log
    assert "HF_ROCM_RANKS_TIMEOUT" in result.log


def test_without_torchrun_both_ranks_raise_the_same_error(checkpoint):
    ranks = run_ranks(SCRIPT, "dtype", checkpoint, "", timeout=TIMEOUT)
    assert [rank.code for rank in ranks] == [1, 1], [rank.log for rank in ranks]
    words = [rank.log.partition("RankError: ")[2] for rank in ranks]
    assert words[0] == words[1] and re.match(r"the ranks would not .* differ in: argument (torch_)?dtype\n", words[0])
