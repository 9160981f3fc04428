"""A whole run with stub servers: parity first, errors by kind, and a server that dies during the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

import pytest

from hf_rocm.cli import main
from hf_rocm.tools.bench import record
from hf_rocm.tools.bench.serving import run
from tests.tools.bench.serving.conftest import ended

FAST = ["--device", "cpu", "--clients", "2", "--requests", "6", "--prompt", "4-9", "--new", "3"]
# the hf_rocm server receives 8 requests for parity and, before the timed requests of the closed loop, 4 to warm up
WARM = 4


@pytest.fixture
def bench(tiny_checkpoint, monkeypatch):
    # Stubs need no packages.
    monkeypatch.setattr("hf_rocm.tools.bench.serving.server.check", lambda: None)
    return lambda *arguments: main(["bench", "serve", str(tiny_checkpoint), *FAST, *arguments])


def test_a_run_prints_and_writes_both_sides(bench, stubs, tmp_path, capsys):
    runs, chart = tmp_path / "runs.json", tmp_path / "chart.svg"
    assert bench("--rate", "500", "--answers", "both", "--save", str(runs), "--chart", str(chart)) == 0
    output = capsys.readouterr()
    assert "parity: hf_rocm returned stock's text for all 8 greedy requests" in output.out
    assert (
        "closed loop, 2 clients: 6 requests, prompts of 4 to 9 tokens, 3 new tokens each, streamed and whole"
        in output.out
    )
    assert "open loop, 500 requests per second" in output.out and "forced without ROCm" in output.out
    for label in (
        "tokens per second",
        "time to first token, ms",
        "time between tokens, ms",
        "time to complete answer, ms",
    ):
        assert output.out.count(f"\n{label} ") == 2
    (segment,) = record.load(runs)
    assert segment.rates is None and segment.serving["command"][:2] == ["transformers", "serve"]
    cases = segment.serving["cases"]
    assert [(case["side"], case["answered"], case["tokens"]) for case in cases] == [
        ("stock", 6, 18), ("hf_rocm", 6, 18), ("stock", 6, 18), ("hf_rocm", 6, 18)
    ]  # fmt: skip
    words = [element.text for element in ElementTree.parse(chart).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert "closed loop, 2 clients: time to first token" in words and "roofline" not in " ".join(words)


def test_a_known_shape_gets_random_weights_that_are_deleted_afterwards(stubs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_rocm.tools.bench.serving.server.check", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["bench", "serve", "--config", "small", "--layers", "1", *FAST, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["model"]["name"] == "small, 1 layer" and output["serving"]["parity"]["equal"] == 8
    assert output["model"]["weights"] == "random" and output["model"]["class"] == "LlamaForCausalLM"
    assert output["serving"]["command"][2].startswith(str(tmp_path)) and not list(tmp_path.glob("hf_rocm_bench_*"))


def test_a_known_shape_whose_context_is_too_short_is_refused_before_it_is_written(stubs, capsys, monkeypatch):
    monkeypatch.setattr("hf_rocm.tools.bench.serving.server.check", lambda: None)
    monkeypatch.setattr(run.checkpoint, "write", lambda *_, **__: pytest.fail("a checkpoint was written"))
    assert main(["bench", "serve", "--config", "small", *FAST, "--prompt", "9000"]) == 1
    assert "longer than the model's context" in capsys.readouterr().err


def test_without_stock_only_the_prepared_server_is_measured_after_the_comparison(bench, stubs, capsys):
    assert bench("--no-stock", "--json") == 0
    served = json.loads(capsys.readouterr().out)["serving"]
    assert [case["side"] for case in served["cases"]] == ["hf_rocm"] and served["parity"]["equal"] == 8
    stubs(hf_rocm={"suffix": "!"})
    assert bench("--no-stock") == 1


def test_chat_needs_a_chat_template(bench, stubs, capsys):
    assert bench("--endpoint", "chat") == 1
    assert "no chat template" in capsys.readouterr().err


def test_json_is_the_segment_and_nothing_else(bench, stubs, capsys):
    assert bench("--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["serving"]["parity"]["equal"] == 8 and output["rates"] is None
    assert {case["load"]["clients"] for case in output["serving"]["cases"]} == {2}


def test_different_answers_are_an_error_and_nothing_is_timed(bench, stubs, capsys, monkeypatch):
    stubs(hf_rocm={"suffix": "!"})
    monkeypatch.setattr(run._Run, "cases", lambda *args: pytest.fail("a case was timed"))
    assert bench() == 1
    output = capsys.readouterr()
    assert "hf_rocm's responses differ from stock's, so nothing is timed" in output.err
    assert "float32 allows no difference" in output.err and "0 of 8 are equal" in output.err and not output.out


def test_in_bf16_small_differences_are_reported_and_timed(bench, stubs, capsys):
    stubs(hf_rocm={"suffix": "!"})
    assert bench("--dtype", "bfloat16", "--new", "8") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "stock's text for 0 of 8 greedy requests" in out and "Allowed in bfloat16" in out


def test_errors_are_counted_by_kind_and_the_run_continues(bench, stubs, capsys):
    stubs(hf_rocm={"fault": "status", "after": 8 + WARM + 2})
    assert bench("--json") == 0
    output = capsys.readouterr()
    stock, prepared = json.loads(output.out)["serving"]["cases"]
    assert stock["errors"] == {} and stock["answered"] == 6
    assert (
        prepared["errors"] == {"HTTP 500": {"count": 4, "example": '{"error": "no memory"}'}}
        and prepared["answered"] == 2
    )


def test_lines_that_are_malformed_are_errors_too(bench, stubs, capsys):
    stubs(hf_rocm={"fault": "garbage", "after": 8 + WARM})
    assert bench() == 0
    output = capsys.readouterr()
    assert "hf_rocm: 6 × malformed response, first: not JSON: {oh" in output.err


def test_a_request_that_fails_before_anything_is_timed_is_an_error(bench, stubs, capsys):
    stubs(stock={"fault": "status"})
    assert bench() == 1
    err = capsys.readouterr().err
    assert "the stock server failed on one of the first requests: HTTP 500" in err and "no memory" in err


@pytest.mark.parametrize("after", [3, 8 + WARM + 1], ids=["parity", "traffic"])
def test_a_server_that_dies_is_an_error_with_its_exit_code(bench, stubs, capsys, after):
    stubs(hf_rocm={"fault": "die", "after": after})
    assert bench() == 1
    assert "the hf_rocm server ended with exit code 7 while it was answering requests" in capsys.readouterr().err


def test_a_missing_model_is_refused_before_a_server_starts(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("hf_rocm.tools.bench.serving.server.check", lambda: None)
    monkeypatch.setattr(run, "serving", lambda *args, **kwargs: pytest.fail("a server was started"))
    assert main(["bench", "serve", str(tmp_path / "nothing"), *FAST]) == 1
    assert "no model could be loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--answers", "half"], "--answers half"),
        (["--prompt", "4-510"], "requests of up to 513 tokens are longer than the model's context"),
        (["--prompt", "9-4"], "--prompt 9-4"),
        (["--prompt", "0"], "--prompt 0"),
        (["--clients", "0"], "--clients 0"),
        (["--rate", "0"], "--rate 0"),
        (["--rate", "fast"], "--rate fast"),
        (["--serve-args", "'"], "--serve-args '"),
        (["--chart", "a.pdf"], "a.pdf"),
        (["--dtype", "int8"], "--dtype int8"),
    ],
)
def test_impossible_requests_are_refused_before_a_server_starts(bench, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(run, "serving", lambda *args, **kwargs: pytest.fail("a server was started"))
    assert bench(*arguments) == 1
    assert words in capsys.readouterr().err


COMMAND = """
import sys
sys.path[:] = {path!r}
from hf_rocm.tools.bench.serving import server
from hf_rocm.cli import main
server.check = lambda: None
for side in server.CODE:
    server.CODE[side] = "from tests.tools.bench.serving.stub import main\\nmain(fault='silent', child={child!r})\\n"
sys.exit(main({arguments!r}))
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_command_and_its_child_processes(tiny_checkpoint, tmp_path):
    child = tmp_path / "pid"
    arguments = ["bench", "serve", str(tiny_checkpoint), *FAST]
    code = COMMAND.format(path=sys.path, child=str(child), arguments=arguments)
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 60
    while not child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # Wait until the server listens and the first request awaits its answer.
    time.sleep(1)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert command.returncode != 0 and "bug in hf-rocm" not in err
    assert ended(int(child.read_text()))
