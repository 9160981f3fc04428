"""The facts that ranks compare: equal text for equal settings in all processes, and different text otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

from hf_rocm import options
from hf_rocm.distributed import facts as module
from hf_rocm.distributed.environment import Place
from hf_rocm.distributed.facts import LOCAL, architecture, facts

FIRST_RANK = Place(0, 2, 0)

OTHER_PROCESS = """
import json, sys, torch, transformers
from hf_rocm.distributed.environment import Place
from hf_rocm.distributed.facts import facts
arguments = {"dtype": torch.bfloat16, "words": {"b", "a"}, "token": 5}
print(json.dumps(facts(Place(1, 2, 1), arguments, transformers.LlamaConfig())))
"""


def facts_of(**arguments):
    return facts(FIRST_RANK, arguments, transformers.LlamaConfig())


def differing(one, other):
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))


def test_another_process_has_the_same_facts():
    import json
    import os

    path = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHER_PROCESS],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = facts_of(dtype=torch.bfloat16, words={"a", "b"}, token=3)
    assert json.loads(result.stdout) == expected
    assert expected["argument dtype"] == "torch.bfloat16" and "argument token" not in expected
    assert {
        "hf_rocm",
        "transformers",
        "torch",
        "GPU",
        "aiter",
        "overlay of llama",
        "modeling_llama.py",
    } <= expected.keys()


@pytest.mark.parametrize("name", ["dtype", "force", "preshuffle", "tp_plan", "attn_implementation", "revision"])
def test_an_argument_that_changes_results_is_compared(name):
    assert name not in LOCAL
    assert differing(facts_of(**{name: "a"}), facts_of(**{name: "b"})) == [f"argument {name}"]


def test_secrets_are_neither_compared_nor_sent():
    assert facts_of(token="hf_1", adapter_kwargs={"revision": "a", "token": "hf_1"}) == facts_of(
        token="hf_2", adapter_kwargs={"revision": "a", "token": "hf_2"}
    )
    assert "hf_1" not in str(facts_of(token="hf_1", adapter_kwargs={"token": "hf_1"}))


def test_long_arguments_are_compared_in_full():
    one, other = ["x"] * 100 + ["y"], ["x"] * 100 + ["z"]
    assert differing(facts_of(plan=one), facts_of(plan=other)) == ["argument plan"]
    assert len(facts_of(plan=one)["argument plan"]) < 80


def test_options_are_compared_except_those_of_one_machine():
    before = facts_of()
    with options.override(tier="torch", probe_timeout=7.0):
        assert differing(before, facts_of()) == ["option tiers"]


def test_tables_are_compared_by_content(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("M,N,K\n")
    (tmp_path / "b.csv").write_text("M,N,K\n")
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "a.csv"))
    before = facts_of()
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "b.csv"))
    assert facts_of() == before
    (tmp_path / "b.csv").write_text("M,N,K\n1,2,3\n")
    assert differing(before, facts_of()) == ["option AITER_CONFIG_GEMM_BF16"]


def test_overlays_are_compared_by_source_and_installed_ones_by_file(tmp_path, monkeypatch):
    shipped = tmp_path / "transformers-4.53" / "models" / "llama" / "modeling_llama.py"
    shipped.parent.mkdir(parents=True)
    shipped.write_text("x = 1\n")
    monkeypatch.setattr(module, "_shipped", lambda: tmp_path)
    before = facts_of()
    shipped.write_text("x = 2\n")
    assert differing(before, facts_of()) == ["overlay of llama"]
    assert "no overlay installed" in before["modeling_llama.py"]
    monkeypatch.setattr(module, "has_block", lambda data: True)
    assert differing(before, facts_of()) == ["modeling_llama.py", "overlay of llama"]


def test_the_config_is_compared_except_its_origin():
    one, other = transformers.LlamaConfig(), transformers.LlamaConfig()
    other._name_or_path = "/elsewhere"
    assert facts(FIRST_RANK, {}, one) == facts(FIRST_RANK, {}, other)
    other.rms_norm_eps = 0.5
    assert differing(facts(FIRST_RANK, {}, one), facts(FIRST_RANK, {}, other)) == ["the model's config"]


def test_the_architecture_is_that_of_the_ranks_own_gpu(monkeypatch):
    assert torch.cuda.is_available() or architecture(FIRST_RANK) == "none (CPU)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "is_rocm", lambda: True)
    monkeypatch.setattr(module, "gpu_arch", lambda index: ["gfx942", "gfx950"][index])
    assert [architecture(Place(n, 4, n)) for n in range(3)] == ["gfx942", "gfx950", "gfx942"]
