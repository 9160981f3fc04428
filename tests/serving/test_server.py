"""`transformers serve` answers like stock's server, with installed overlays and with prepared models."""

from __future__ import annotations

import pytest
from packaging.version import Version

from tests.serving.batching import RELEASE
from tests.serving.server import missing, serving, site

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing()), reason=f"not run: needs {', '.join(missing())} (pip install 'transformers[serving]')"
    ),
    pytest.mark.skipif(
        RELEASE.major == 4 and RELEASE.minor < 54, reason="not run: serve before 4.54 has a different interface"
    ),
]

ATTENTION = {"attend_into_cache", "attention", "decode_attention", "varlen_attention"}
PROMPTS = ("the value of", "a class is", "if")
NEW = 8

# All endpoints of the release that take text, as (path, function that returns the request).
CHAT = "/v1/chat/completions", lambda prompt: {"messages": [{"role": "user", "content": prompt}], "max_tokens": NEW}
RESPONSES = "/v1/responses", lambda prompt: {"input": prompt, "max_output_tokens": NEW, "stream": True}
COMPLETIONS = "/v1/completions", lambda prompt: {"prompt": prompt, "max_tokens": NEW}
ENDPOINTS = (CHAT, RESPONSES) if RELEASE.major == 4 else (CHAT, RESPONSES, COMPLETIONS)


def answers(server, model, endpoints=ENDPOINTS):
    """Returns the greedy answers of these endpoints, streamed and whole. /v1/responses streams in both cases."""
    texts = {}
    for path, body_of in endpoints:
        for stream in (False, True):
            for prompt in PROMPTS:
                body = {"model": str(model), "temperature": 0, "stream": stream, **body_of(prompt)}
                texts[path, stream, prompt] = server.post(path, body)
    return texts


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return site(tmp_path_factory.mktemp("site"), "llama")


@pytest.fixture(scope="module")
def stocks_answers(tmp_path_factory, chatty_checkpoint):
    with serving(tmp_path_factory.mktemp("stock") / "server", "--device", "cpu") as server:
        texts = answers(server, chatty_checkpoint)
    assert server.facts["routes"] == []
    # for every prompt, all endpoints return the same answer, and answers to different prompts differ
    assert all(texts.values()) and len(set(texts.values())) == len(PROMPTS)
    return texts


@pytest.mark.parametrize("prepared", [False, True], ids=["overlays", "prepared"])
def test_the_server_answers_like_stocks(prepared, installed, stocks_answers, chatty_checkpoint, tmp_path):
    environment = {"HF_ROCM_FORCE": "1", **({"HF_ROCM_AUTO": "1"} if prepared else {})}
    with serving(tmp_path / "server", "--device", "cpu", path=installed, **environment) as server:
        assert answers(server, chatty_checkpoint) == stocks_answers
    facts = server.facts
    assert facts["transformers"].startswith(str(installed))
    ran = {operation for operation, _ in facts["routes"]}
    assert {"attention", "rms_norm", "add_rms_norm", "rope"} <= ran
    (model,) = facts["models"]
    assert model["prepared"] is prepared
    assert prepared or {part["delivery"] for part in model["parts"]} == {"installed"}
    assert not any(part["stayed_stock"] for part in model["parts"])
    fused = [shapes[1][0] for operation, shapes in facts["routes"] if operation == "linear"]
    # A prepared model runs one GEMM for q, k and v, and one for gate and up.
    assert bool(fused) is prepared


@pytest.mark.skipif(
    RELEASE.major == 4,
    reason="not run: in 4.57, serve streams from a list that another thread extends, so its text varies",
)
def test_continuous_batching_answers_like_stocks_server(installed, stocks_answers, chatty_checkpoint, tmp_path):
    arguments = ["--device", "cpu", "--continuous-batching", "--cb-num-blocks", "8", "--cb-max-batch-tokens", "64"]
    environment = {"HF_ROCM_FORCE": "1", "HF_ROCM_AUTO": "1"}
    with serving(tmp_path / "server", *arguments, path=installed, **environment) as server:
        texts = answers(server, chatty_checkpoint, (CHAT, COMPLETIONS))
    assert texts == {key: text for key, text in stocks_answers.items() if key in texts}
    ran = {operation for operation, _ in server.facts["routes"]}
    assert {"rms_norm", "add_rms_norm", "act_and_mul"} <= ran
    # from 5.9 on, layers call hf_rocm's attention through transformers' flash interface
    assert ran & ATTENTION == ({"varlen_attention"} if Version("5.9") <= RELEASE else set())
    (model,) = server.facts["models"]
    (attention,) = [part for part in model["parts"] if part["cls"] == "LlamaAttention"]
    stayed = [] if Version("5.9") <= RELEASE else [attention["instances"]]
    assert list(attention["stayed_stock"].values()) == stayed
