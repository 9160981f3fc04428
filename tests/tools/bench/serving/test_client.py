"""One request over HTTP: text and times of whole and streamed responses, and the kind of every failure."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from hf_rocm.tools.bench.serving.client import PATHS, Request, send_request
from tests.tools.bench.serving.stub import FAULTS, answering, word

NEW = 4

KINDS = {
    "status": "HTTP 500",
    "garbage": "malformed response",
    "no-choices": "malformed response",
    "no-usage": "malformed response",
    "error-event": "error event",
    "early": "ended early",
    "cut": "connection lost",
    "endless-size": "malformed response",
    "short": "wrong length",
    "silent": "timeout",
    "not-http": "malformed response",
}


def send(port, *, stream=True, timeout=10.0, **options):
    return asyncio.run(send_request(port, "a-model", Request("a prompt", NEW, stream, **options), timeout=timeout))


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_has_its_text_tokens_and_times(stream, endpoint):
    before = time.perf_counter()
    with answering() as server:
        response = send(server.port, stream=stream, endpoint=endpoint)
    assert response.error is None
    assert response.text == "".join(word("a prompt", index) for index in range(NEW))
    assert (response.prompt, response.tokens) == (3, NEW)
    assert len(response.pieces) == (NEW if stream else 0)
    assert [before, response.sent, *response.pieces, response.ended] == sorted(
        [before, response.sent, *response.pieces, response.ended]
    )


def test_a_client_that_leaves_disconnects_after_half_of_the_answer():
    with answering() as server:
        response = send(server.port, leave=True)
    assert response.left and response.error is None and len(response.pieces) == NEW // 2
    assert response.text == "".join(word("a prompt", index) for index in range(NEW // 2))


def test_every_fault_of_a_running_server_has_a_kind():
    assert KINDS.keys() == set(FAULTS) - {"die"}


@pytest.mark.parametrize("fault", KINDS)
def test_a_failure_is_an_answer_with_its_kind(fault):
    with answering(fault) as server:
        response = send(server.port, timeout=0.5 if fault == "silent" else 10.0)
    assert response.error == KINDS[fault]
    assert response.detail


@pytest.mark.parametrize("fault", ["garbage", "no-usage", "short"])
def test_whole_answers_fail_with_the_same_kinds(fault):
    with answering(fault) as server:
        assert send(server.port, stream=False).error == KINDS[fault]


def test_the_answer_of_a_failed_request_is_its_detail():
    with answering("status") as server:
        assert send(server.port).detail == '{"error": "no memory"}'


def test_a_port_without_a_server_is_a_refused_connection():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert send(taken.getsockname()[1]).error == "connection refused"


def test_the_request_is_greedy_and_has_no_end_token():
    body = Request("a prompt", NEW, True).body("a-model")
    assert body["temperature"] == 0 and body["max_tokens"] == NEW and body["stream"] is True
    assert body["prompt"] == "a prompt"
    assert Request("a prompt", NEW, True, "chat").body("a-model") == {
        **{name: value for name, value in body.items() if name != "prompt"},
        "messages": [{"role": "user", "content": "a prompt"}],
    }
    assert '"eos_token_id": null' in body["generation_config"] and '"do_sample": false' in body["generation_config"]
