"""Calls to `generate` that stream from a separate thread, as servers make them, decode with recorded steps."""

from __future__ import annotations

import queue
import threading

import torch
import transformers

import hf_rocm
from hf_rocm.generation.state import known
from tests.generation.conftest import make, recorded_on_cpu  # noqa: F401 - a fixture
from tests.serving.batching import NEW, one_by_one, prompts


class Streamer(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.tokens = queue.Queue()

    def put(self, value):
        self.tokens.put(value.flatten().tolist())

    def end(self):
        self.tokens.put(None)


def stream_tokens(model, prompt, **arguments):
    """Returns the tokens of one request, received while `generate` runs in a new thread."""
    streamer, ids = Streamer(), torch.tensor([prompt])
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    keywords = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_config": config, **arguments}
    thread = threading.Thread(target=model.generate, kwargs={**keywords, "streamer": streamer})
    thread.start()
    tokens = []
    while (piece := streamer.tokens.get(timeout=60)) is not None:
        tokens += piece
    thread.join()
    return tokens[len(prompt) :]


def test_requests_one_after_the_other_replay_recorded_steps(recorded_on_cpu):  # noqa: F811
    """`transformers serve` in 5.23 requests only the tokens, and not the cache."""
    expected = one_by_one(make("llama"), prompts())
    model = hf_rocm.prepare(make("llama"), force=True, graphs=True)
    assert [stream_tokens(model, prompt) for prompt in prompts()] == expected
    state = known(model)
    recorded, replayed = state.recorded, state.replayed
    # There is one recording per cache size.
    assert 0 < recorded < len(expected)
    assert [stream_tokens(model, prompt) for prompt in prompts()] == expected
    assert state.recorded == recorded and state.replayed > replayed + len(expected)


def test_requests_that_return_their_cache_are_recorded_too(recorded_on_cpu):  # noqa: F811
    """`transformers serve` in 4.57 and 5.0 keeps the cache for the next turn of the conversation."""
    expected = one_by_one(make("llama"), prompts())
    model = hf_rocm.prepare(make("llama"), force=True, graphs=True)
    arguments = {"return_dict_in_generate": True, "past_key_values": None}
    assert [stream_tokens(model, prompt, **arguments) for prompt in prompts()] == expected
    assert known(model).recorded and known(model).replayed and not known(model).turned_away
