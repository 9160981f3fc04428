"""hf-rocm bench serve with transformers' own server, both stock and with hf_rocm."""

from __future__ import annotations

import json

import pytest

from hf_rocm.cli import main
from hf_rocm.errors import OptionError
from hf_rocm.tools.bench.serving import server


def refusal():
    try:
        server.check()
    except OptionError as error:
        return error.message
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(refusal() is not None, reason=f"not run: {refusal()}"),
]

ARGUMENTS = ["--device", "cpu", "--clients", "3", "--rate", "20", "--requests", "6", "--prompt", "4-30", "--new", "6"]
SMALL = ["--serve-args", "--cb-num-blocks 8 --cb-max-batch-tokens 64"]


def test_both_servers_answer_alike_and_are_measured(chatty_checkpoint, capfd):
    options = [*ARGUMENTS, "--no-continuous-batching", "--answers", "both", "--json"]
    assert main(["bench", "serve", str(chatty_checkpoint), *options]) == 0
    served = json.loads(capfd.readouterr().out)["serving"]
    assert (served["parity"]["equal"], served["parity"]["total"]) == (8, 8)
    assert "--continuous-batching" not in served["command"]
    assert [(case["side"], case["title"]) for case in served["cases"]] == [
        (side, title)
        for title in ("closed loop, 3 clients", "open loop, 20 requests per second")
        for side in ("stock", "hf_rocm")
    ]
    for case in served["cases"]:
        assert case["errors"] == {} and case["answered"] == 6 and case["tokens"] == 36
        assert 4 <= case["prompt_tokens"] / 6 <= 30 and 0 < case["pieces"] <= case["streamed_tokens"] == 18
        assert 0 < case["times"]["first"]["median"] < case["times"]["whole"]["p99"]
        assert case["rate"] == pytest.approx(36 / case["seconds"])
    assert any(line.startswith("steps run uncaptured") for line in served["explained"])


def test_a_known_shape_is_measured_with_random_weights_over_chat_with_abandoned_streams(capfd):
    chat = ["--endpoint", "chat", "--abandon", "0.5", "--seed", "1"]
    assert main(["bench", "serve", "--config", "small", "--layers", "2", *ARGUMENTS, *SMALL, *chat, "--json"]) == 0
    output = json.loads(capfd.readouterr().out)
    served = output["serving"]
    assert output["model"]["weights"] == "random" and served["parity"]["equal"] == 8
    assert "--continuous-batching" in served["command"]
    assert any("batching runs" in line for line in served["explained"])
    for case in served["cases"]:
        # every token is visible, and no end-of-sequence token ends an answer
        assert case["errors"] == {} and 0 < case["left"] < 6 and case["answered"] + case["left"] == 6
        assert case["tokens"] == case["streamed_tokens"] == case["pieces"] == 6 * case["answered"]


def test_a_model_that_does_not_load_is_an_error_with_the_servers_last_lines(chatty_checkpoint, tmp_path, capfd):
    for file in chatty_checkpoint.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main(["bench", "serve", str(tmp_path), *ARGUMENTS]) == 1
    err = capfd.readouterr().err
    assert "the stock server ended with exit code 1 while it was loading the model" in err and "safetensors" in err
