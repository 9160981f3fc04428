"""Starting ranks: refusals before the start, failing ranks, and the cause that is reported."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from hf_rocm.cli import main
from hf_rocm.errors import OptionError, RankError
from hf_rocm.tools.bench import peers, rank, ranks, record
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.measure import Mismatch
from hf_rocm.tools.bench.run import Subject
from hf_rocm.tools.bench.scaling import Exchange
from hf_rocm.tools.bench.variants import Side
from tests.tools.bench.conftest import CPU, Part, segment

SMALL = Subject(None, "small", CPU, layers=1)
TINY = ["--config", "small", "--layers", "1", "--device", "cpu", "--rounds", "1", "--prompt", "8", "--new", "4"]

# programs that stand in for ranks
KILLED = """
import os, signal, sys, time
if sys.argv[2] == "1":
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
RAISED = """
import json, sys, time
from pathlib import Path
rank = int(sys.argv[2])
failure = [{"message": "the peer is gone"}, {"message": "no such file", "facts": {"file": "x"}, "hint": "look"}][rank]
place = Path(sys.argv[1])
while rank == 0 and not (place / "failed-1.json").exists():  # fails after its peer
    time.sleep(0.01)
(place / f"failed-{rank}.draft").write_text(json.dumps({"at": time.time(), "facts": {}, "hint": None, **failure}))
(place / f"failed-{rank}.draft").rename(place / f"failed-{rank}.json")
while rank == 1 and not (place / "failed-0.json").exists():
    time.sleep(0.01)
if rank == 0:
    time.sleep(600)
sys.exit(1)
"""
SILENT = "import sys; print('first'); print('and last'); sys.exit(3 * int(sys.argv[2]))"
MISMATCH = """
import json, sys, time
from pathlib import Path
place, rank = Path(sys.argv[1]), int(sys.argv[2])
failure = {"at": 0, "error": "Mismatch", "message": "wrong everywhere", "facts": {"error": "1"}, "hint": "report"}
if rank == 1:
    (place / "failed-1.json").write_text(json.dumps(failure))
    sys.exit(1)
time.sleep(600)
"""
SUCCESSFUL = """
import json, sys
from pathlib import Path
place, rank = Path(sys.argv[1]), int(sys.argv[2])
task = json.loads((place / "task.json").read_text())
assert task["world"] == 2 and task["sides"] == ["stock"] and task["port"] > 0
(place / "progress").write_text("working")
import time; time.sleep(0.3)
if rank == 0:
    (place / "result.json").write_text(json.dumps(ANSWER))
"""


@pytest.fixture
def run_in_ranks(monkeypatch):
    """Returns a function that makes every rank run a given program. No checkpoint is written."""

    def replace(program: str) -> None:
        monkeypatch.setattr(ranks, "_CHILD", program)
        monkeypatch.setattr(ranks.dummy_checkpoint, "write", lambda *arguments, **keywords: None)

    return replace


@pytest.mark.parametrize(
    ("program", "message", "facts"),
    [
        (KILLED, "rank 1 was killed by signal 9 (SIGKILL)", {"last lines": "about to die"}),
        (RAISED, "rank 1 failed: no such file", {"file": "x"}),
        (SILENT, "rank 1 ended with exit code 3", {"last lines": "first / and last"}),
        (MISMATCH, "wrong everywhere", {"error": "1"}),
    ],
    ids=["killed", "raised", "silent", "mismatch"],
)
def test_a_failed_rank_ends_all_ranks_and_the_cause_is_named(run_in_ranks, program, message, facts, monkeypatch):
    run_in_ranks(program)
    started = []
    start = ranks.subprocess.Popen
    monkeypatch.setattr(
        ranks.subprocess, "Popen", lambda *rest, **keywords: started.append(start(*rest, **keywords)) or started[-1]
    )
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        run()
    assert error.value.message == message and error.value.facts == facts
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    # In most of these programs, rank 0 would sleep for 600 s.
    assert time.monotonic() - began < 300


def run():
    return ranks.bench_ranks(
        SMALL, [Case("decode", 1, 8, 4)], ["stock"], ranks=2, rounds=1, segment="x", progress=lambda text: None
    )


def test_a_failed_rank_ends_the_command_with_its_cause_and_writes_nothing(run_in_ranks, tmp_path, capsys):
    run_in_ranks(KILLED)
    file = tmp_path / "runs.json"
    assert main(["bench", *TINY, "--tp", "2", "--save", str(file), "--json"]) == 1
    captured = capsys.readouterr()
    assert (
        json.loads(captured.out)["message"] == "rank 1 was killed by signal 9 (SIGKILL)" and "SIGKILL" in captured.err
    )
    assert not file.exists() and not list(tmp_path.iterdir())


def test_the_result_is_that_of_rank_0(run_in_ranks):
    expected = segment(parallel={"tp": 2, "world": 2, "backend": "gloo", "wire": 1e9, "exchanges": []})
    run_in_ranks(SUCCESSFUL.replace("ANSWER", f"json.loads({json.dumps(expected.to_dict())!r})"))
    calls = []
    done = ranks.bench_ranks(
        SMALL, [Case("decode", 1, 8, 4)], ["stock"], ranks=2, rounds=1, segment="x", progress=calls.append
    )
    assert done == expected and "working" in calls


def test_a_segment_of_several_ranks_is_read_as_written(tmp_path):
    expected = segment(parallel={"tp": 2})
    record.write(tmp_path / "runs.json", [expected, segment("other")])
    table = record.load(tmp_path / "runs.json")
    assert table[0] == expected and table[1].parallel is None


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(ranks.subprocess, "Popen", lambda *rest, **keywords: pytest.fail("a rank was started"))
    monkeypatch.setattr(
        ranks.dummy_checkpoint, "write", lambda *rest, **keywords: pytest.fail("a checkpoint was written")
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([*TINY, "--tp", "4"], 1, "heads can't be divided among 4 ranks: 2 (num_key_value_heads)"),
        ([*TINY, "--tp", "3"], 1, "can't be divided among 3 ranks"),
        (
            [*TINY, "--tp", "2", "--sides", "stock,compile"],
            1,
            "the side 'compile' is not compared across several ranks",
        ),
        (["--config", "bert-base", "--device", "cpu", "--tp", "2"], 1, "is an encoder"),
        ([*TINY, "--tp", "2", "--profile", "trace.json"], 2, "--profile supports a single device"),
        ([*TINY, "--tp", "1"], 2, "--tp"),
    ],
)
def test_unsupported_arguments_are_refused_before_the_start(nothing_starts, arguments, code, words, capsys):
    assert main(["bench", *arguments]) == code
    captured = capsys.readouterr()
    assert words in " ".join((captured.out + captured.err).replace("│", " ").split())


def test_fewer_gpus_than_ranks_are_refused(nothing_starts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = Subject(None, "llama-8b", torch.device("cuda", 0))
    with pytest.raises(OptionError, match="--tp 4 needs 4 GPUs") as error:
        ranks.check(gpu, ["stock"], 4)
    assert error.value.facts == {"found": "2"} and "--tp 2" in str(error.value.hint)
    ranks.check(gpu, ["stock", "hf_rocm"], 2)
    with pytest.raises(OptionError, match="uses the first GPUs"):
        ranks.check(Subject(None, "llama-8b", torch.device("cuda", 1)), ["stock"], 2)


def test_ranks_that_choose_different_tokens_are_detected(monkeypatch):
    def gather(gathered, tokens):
        for number, entry in enumerate(gathered):
            entry.copy_(tokens + (number == 2))

    monkeypatch.setattr(peers.dist, "all_gather", gather)
    one = object.__new__(rank._Rank)
    one.peers = peers.Peers(4, CPU)
    tokens = torch.arange(6).reshape(2, 3)
    assert one.peers.differing(tokens) == [2]
    side = Side("hf_rocm", None)
    with pytest.raises(Mismatch, match="hf_rocm: the ranks chose different tokens") as error:
        one._same_everywhere(side, Case("decode", 2, 1, 2), tokens)
    assert error.value.facts["unlike rank 0"] == "2"


def test_the_number_of_equal_leading_tokens_is_reported():
    one = object.__new__(rank._Rank)
    one.task = SimpleNamespace(sides=["stock", "hf_rocm"])
    first, other = rank._Samples(), rank._Samples()
    first.tokens = other.tokens = torch.arange(20).reshape(2, 10)
    assert one._agreement_note(first, other, Case("decode", 2, 6, 4)) == "all 4 new tokens agree with those of stock"
    other.tokens = first.tokens.clone()
    other.tokens[1, 8] = 0
    assert one._agreement_note(first, other, Case("decode", 2, 6, 4)).startswith(
        "the first 2 new tokens agree with those of"
    )
    assert one._agreement_note(first, other, Case("prefill", 2, 6)) is None


def test_the_communicated_bytes_follow_from_the_sharded_layers(model):
    case = Case("decode", 3, 8, 4)
    whole = peers.exchanged(model, case, 2)
    assert whole == Exchange(2, sums=2, message=3 * 256 * 4, gathered=0)
    model.lm_head.weight = Part(model.lm_head.weight.detach())
    model.model.embed_tokens.weight = Part(model.model.embed_tokens.weight.detach())
    assert peers.exchanged(model, case, 2) == Exchange(2, sums=3, message=3 * 256 * 4, gathered=3 * 2048 * 4)
    prefill = peers.exchanged(model, Case("prefill", 3, 8), 2)
    assert prefill.message == 8 * whole.message and prefill.gathered == 3 * 2048 * 4
