"""`hf-rocm bench --tp` with real ranks, end to end, over gloo or on two GPUs: transformers shards both sides."""

from __future__ import annotations

import json

import pytest
import torch

from hf_rocm.cli import main
from hf_rocm.tools.bench import ranks, record, report

TINY = ["--device", "cpu", "--rounds", "1", "--prompt", "8", "--new", "4", "--tp", "2"]

# a rank that is killed while the other one waits for it in an all-reduce
KILLED = """
from hf_rocm.tools.bench import rank
if sys.argv[2] == "1":
    import signal
    rank.trial = lambda *rest, **named: os.kill(os.getpid(), signal.SIGKILL)
os._exit(rank.main(sys.argv[1], int(sys.argv[2])))
"""
# hf_rocm's norms are slightly wrong on both ranks; only the prepared side runs them
WRONG = """
from hf_rocm.tools.bench import rank
from hf_rocm.ops import pointwise, registry
original = pointwise.torch_rms_norm
for implementation in registry.operations()["rms_norm"].implementations:
    implementation.__dict__["call"] = lambda *rest: original(*rest) * 1.001
os._exit(rank.main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.slow
def test_stock_and_prepared_models_of_a_named_shape_are_measured(tmp_path, capsys):
    file = tmp_path / "runs.json"
    assert main(["bench", "--config", "small", "--layers", "2", *TINY, "--save", str(file), "--segment", "two"]) == 0
    captured = capsys.readouterr().out
    assert "tensor parallel across 2 ranks, gloo" in captured and "forced without ROCm" in captured
    assert captured.count("\nstock ") == 2 and captured.count("\nhf_rocm ") == 2
    (segment,) = record.load(file)
    assert segment.name == "two" and segment.model["name"] == "small, 2 layers"
    parallel = segment.parallel
    assert parallel is not None and (parallel["tp"], parallel["world"], parallel["backend"]) == (2, 2, "gloo")
    decode, prefill = parallel["exchanges"]
    assert decode["sums"] in (4, 5) and decode["message"] == 256 * 4 and prefill["message"] == 8 * 256 * 4
    assert decode["sent"] == decode["sums"] * decode["message"] + decode["gathered"] / 2
    assert decode["gathered"] in (0, 2048 * 4) and prefill["sent_per_token"] == prefill["sent"] / 8
    for result in segment.results:
        stock, prepared = result.timings
        assert (stock.side, prepared.side) == ("stock", "hf_rocm") and len(prepared.rounds) == 1
        assert stock.parity.refusal is None and prepared.parity.refusal is None
        assert result.floor.exchange > 0 and result.floor.milliseconds > result.floor.exchange
        assert report.exchange(segment, result)
    assert "all 4 new tokens agree with those of stock" in segment.results[0].timings[1].note
    # each rank reads half of the layers' matrices, and all of lm_head or half of it
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704
    head = 2048 * 256 // (2 if decode["gathered"] else 1)
    assert segment.model["matrix_bytes"] == 4 * (2 * layer // 2 + head)


@pytest.mark.slow
def test_a_checkpoint_is_measured_with_its_own_weights(tiny_checkpoint, capsys):
    arguments = [str(tiny_checkpoint), *TINY, "--kinds", "decode", "--sides", "stock,no-graphs", "--json"]
    assert main(["bench", *arguments]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["weights"] == "its own" and data["parallel"]["tp"] == 2
    assert [timing["side"] for timing in data["results"][0]["timings"]] == ["stock", "no-graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (KILLED, "rank 1 was killed by signal 9 (SIGKILL)"),
        (WRONG, "hf_rocm returns wrong results on 2 ranks, so nothing is timed"),
    ],
    ids=["killed", "wrong"],
)
def test_a_failed_rank_and_wrong_results_end_the_command(program, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "_CHILD", program)
    file = tmp_path / "runs.json"
    arguments = ["--config", "small", "--layers", "1", *TINY, "--kinds", "prefill", "--save", str(file), "--json"]
    assert main(["bench", *arguments]) == 1
    assert json.loads(capsys.readouterr().out)["message"] == message
    assert not file.exists()


@pytest.mark.gpu
@pytest.mark.slow
def test_two_gpus_are_measured(capsys):
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: needs two GPUs")
    arguments = ["--config", "llama-8b", "--layers", "4", "--rounds", "1", "--prompt", "64", "--new", "16", "--tp", "2"]
    assert main(["bench", *arguments, "--kinds", "decode", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parallel"]["backend"].split()[0] in ("NCCL", "RCCL") and "apart" in data["parallel"]
    assert len(data["results"][0]["timings"]) == 2
