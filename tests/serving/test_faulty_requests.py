"""A failing request, a full cache, and concurrent requests: errors equal stock's, and the model still works."""

from __future__ import annotations

import copy
import threading
import time
from importlib.util import find_spec

import pytest
import transformers

import hf_rocm
from hf_rocm.layers import flash_functions
from tests.generation.conftest import make
from tests.serving.batching import NEW, RELEASE, one_by_one, prompts

pytestmark = [
    pytest.mark.skipif(RELEASE.release < (5, 9), reason="not run: this release has no paged flash attention"),
    pytest.mark.skipif(find_spec("flash_attn") is not None, reason="not run: flash-attn is installed and is used"),
]

# Maximum number of seconds for all answers on a busy machine.
WAIT = 60.0
# name → the prompt and the arguments of a request that can't be answered
FAULTS = {
    "unknown argument": (prompts()[2], {"nonsense": 3}),
    "longer than the cache": (list(range(3, 60)) * 3, {}),
    "not in the vocabulary": ([5, 1000, 3], {}),
}


def begin(model):
    from transformers.generation import ContinuousBatchingConfig

    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(page_size=8, num_blocks=14, max_batch_tokens=24),
    )
    manager.start()
    return manager


def collect(manager, count):
    """Wait until there are this many answers, `WAIT` seconds have passed or the manager has stopped.

    Returns name → (tokens, error).
    """
    answers = {}
    deadline = time.monotonic() + WAIT
    while len(answers) < count and time.monotonic() < deadline:
        result = manager.get_result(timeout=0.05)
        if result is not None:
            answers[result.request_id] = list(result.generated_tokens), result.error
        elif not manager.is_running():
            break
    return answers


def send_requests(model, prompt=None, **arguments):
    """Send a request, wait for its answer, and send another if the manager is still running. Returns the answers."""
    manager = begin(model)
    try:
        manager.add_request(prompt or prompts()[2], request_id="first", eos_token_id=-1, **arguments)
        answers = collect(manager, 1)
        if manager.is_running():
            manager.add_request(prompts()[0], request_id="second", eos_token_id=-1)
            answers |= collect(manager, 1)
    finally:
        manager.stop(block=True, timeout=WAIT, hard_stop=True)
    return answers


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_request_gets_stocks_error_and_the_model_still_works(fault):
    prompt, arguments = FAULTS[fault]
    stock = make("llama")
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    expected = send_requests(stock, prompt, **arguments)
    assert send_requests(prepared, prompt, **arguments) == expected
    assert expected["first"][1] is not None
    alone = one_by_one(stock, prompts())
    assert expected.get("second", (alone[0], None)) == (alone[0], None)
    assert_works(prepared, alone)


def test_an_exception_in_attention_is_the_error_of_its_requests(monkeypatch):
    model = make("llama")
    alone = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    with monkeypatch.context() as patch:
        patch.setattr(flash_functions.ops, "varlen_attention", broken)
        answers = send_requests(model)
    assert answers["first"] == ([], "a kernel failed")
    assert_works(model, alone)


def broken(*args, **kwargs):
    raise RuntimeError("a kernel failed")


def assert_works(model, alone):
    """Check that the next two requests and `generate` return the tokens of the stock model for each prompt."""
    assert model.config._attn_implementation == "sdpa"
    assert send_requests(model) == {"first": (alone[2], None), "second": (alone[0], None)}
    assert model.config._attn_implementation == "sdpa"
    assert one_by_one(model, prompts()) == alone


def test_more_requests_than_the_cache_can_hold_are_answered_in_turn():
    model = make("llama")
    alone = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    manager = begin(model)

    def client(number):
        for turn in range(4):
            index = (number + turn) % len(alone)
            manager.add_request(prompts()[index], request_id=f"{number}-{turn}-{index}", eos_token_id=-1)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    try:
        for thread in threads:
            thread.start()
        answers = collect(manager, 16)
    finally:
        for thread in threads:
            thread.join()
        manager.stop(block=True, timeout=WAIT)
    assert len(answers) == 16
    assert all(result == (alone[int(name.rpartition("-")[2])], None) for name, result in answers.items())
    assert_works(model, alone)
