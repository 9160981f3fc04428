"""The ledger of replays that differed, and recording on systems where replays are known to be wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import hf_rocm
from hf_rocm.device import Device, simulated
from hf_rocm.generation import ledger
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make

EVENT = ledger.Event(
    when="2026-11-22T12:00:00+00:00",
    gpu="AMD Instinct MI300X (gfx942)",
    rocm="7.2.1",
    driver="6.16.6",
    torch="2.12.0",
    transformers="5.23.0",
    hf_rocm="0.2.0",
    model="LlamaForCausalLM",
    checkpoint="some/model",
    operators=412,
    replays=96,
    unproven=31,
    reason="a replayed step differed",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_events_are_written_and_read() -> None:
    assert ledger.events() == ()
    other = EVENT.__class__(**{**vars(EVENT), "rocm": None, "replays": 7})
    ledger.record(EVENT)
    ledger.record(other)
    assert ledger.events() == (EVENT, other)
    assert EVENT.command() == "HF_ROCM_GRAPHS=1 hf-rocm verify some/model"
    assert EVENT.command(force=True).endswith("some/model --force")
    assert "gfx942" in str(EVENT) and "7.2.1" in str(EVENT) and "412" in str(EVENT)
    assert "torch 2.12.0, transformers 5.23.0" in str(EVENT)


def test_without_a_home_folder_an_event_is_only_logged(monkeypatch, caplog) -> None:
    def homeless():
        raise FileNotFoundError("this user has no home folder")

    monkeypatch.setattr(ledger.options, "cache_folder", homeless)
    ledger.record(EVENT)
    assert "no home folder" in caplog.text


def test_unreadable_lines_are_skipped() -> None:
    ledger.record(EVENT)
    with ledger.path().open("a") as file:
        file.write('{"when": "2026"}\n[1]\n{"cut off\n')
    ledger.record(EVENT)
    assert ledger.events() == (EVENT, EVENT)


def test_the_newest_events_are_returned() -> None:
    for number in range(ledger._MAX_EVENTS + 5):
        ledger.record(EVENT.__class__(**{**vars(EVENT), "replays": number}))
    assert [event.replays for event in ledger.events()] == list(range(5, ledger._MAX_EVENTS + 5))


def test_an_unwritable_folder_raises_no_error(folder, caplog) -> None:
    folder.write_text("a file")
    ledger.record(EVENT)
    assert "graph_events.jsonl" in caplog.text and ledger.events() == ()


def test_reading_imports_no_torch() -> None:
    code = "import sys; from hf_rocm.generation import ledger; ledger.events(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_recorded_with_a_known_fault(suspect_gpu) -> None:
    prepared, stock = hf_rocm.prepare(make("llama"), force=True), make("llama")
    assert torch.equal(generate(prepared), generate(stock))
    assert known(prepared) is None
    line, *others = hf_rocm.explain(prepared).decoding
    assert "issues/279" in line and "HF_ROCM_GRAPHS=1" in line
    assert any("issues/279" in other and "use_cuda_graph" in other for other in others)


def test_a_model_that_moves_to_a_gpu_with_a_known_fault_runs_uncaptured(recorded_on_cpu, monkeypatch) -> None:
    prepared, stock = hf_rocm.prepare(make("llama"), force=True), make("llama")
    monkeypatch.setattr(torch.version, "rocm", "7.2.1", raising=False)
    with simulated("cpu", Device("cpu", rocm=True, arch="gfx942")):
        assert torch.equal(generate(prepared), generate(stock))
        assert counted(prepared) == (0, 0)
        assert any("issues/279" in reason for reason in known(prepared).turned_away)
        assert "issues/279" in hf_rocm.explain(prepared).decoding[0]


def test_required_graphs_are_recorded_despite_a_known_fault(suspect_gpu, caplog) -> None:
    prepared, stock = hf_rocm.prepare(make("llama"), force=True, graphs=True), make("llama")
    assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared) == (1, 8)
    assert caplog.text.count("because graphs are required") == 1
    explanation = hf_rocm.explain(prepared).decoding
    assert explanation[0] == "steps are recorded and replayed" and any("issues/279" in line for line in explanation)
