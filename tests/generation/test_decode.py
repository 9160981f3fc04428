"""Recorded steps return stock's tokens, and the tests check that steps were replayed."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from packaging.version import Version

from hf_rocm.generation.state import known
from tests.generation.conftest import KINDS, counted, generate, prompt

AT_LEAST_5 = Version(transformers.__version__) >= Version("5")
SERVED = [kind for kind in KINDS if AT_LEAST_5 or kind != "mixtral"]

# the number of steps after the prompt that are not counted as replayed: the first step, the one that is recorded, and
# the one with the first comparison
FIRST = 3


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("padded", [0, 3])
def test_greedy_tokens_equal_stock_beyond_every_window(kind, padded, pair):
    prepared, stock = pair(kind)
    inputs = prompt(padded=padded)
    assert torch.equal(generate(prepared, inputs, new=25), generate(stock, inputs, new=25))
    assert counted(prepared) == (1, 24 - FIRST)


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 23])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_prompts_of_any_length_are_decoded_with_one_recording(kind, length, pair):
    prepared, stock = pair(kind)
    inputs = prompt(length=length)
    assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert counted(prepared) == (1, 11 - FIRST)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_sampling_draws_the_same_tokens_as_stock(kind, pair):
    prepared, stock = pair(kind)
    options = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3, "repetition_penalty": 1.2}
    for seed in (0, 1):
        assert torch.equal(generate(prepared, seed=seed, **options), generate(stock, seed=seed, **options))
    assert torch.equal(torch.rand(3), _after(stock, options))
    assert counted(prepared) == (1, 11 - FIRST + 11)


def _after(stock, options):
    generate(stock, seed=1, **options)
    return torch.rand(3)


def test_several_sequences_per_prompt_equal_stock(pair):
    prepared, stock = pair()
    options = {"do_sample": True, "num_return_sequences": 3}
    assert torch.equal(generate(prepared, seed=0, **options), generate(stock, seed=0, **options))
    assert counted(prepared) == (1, 11 - FIRST)


# prevents repeated tokens, so that any generated token can be the EOS token
VARIED = {"repetition_penalty": 9.0}


class Streamer:
    """A streamer that keeps its tokens."""

    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("late", [False, True])
def test_streamed_tokens_equal_stock(late, pair, request):
    if late:
        request.getfixturevalue("ends_checked_late")
    prepared, stock = pair()
    ends = generate(stock, prompt(rows=1), **VARIED)[0, 15].item()
    streamers = Streamer(), Streamer()
    for model, streamer in zip((prepared, stock), streamers, strict=True):
        generate(model, prompt(rows=1), streamer=streamer, eos_token_id=ends, **VARIED)
    assert len(streamers[0].tokens) == 1 + 16 - 7
    assert streamers[0].tokens == streamers[1].tokens and streamers[0].ended == 1
    assert counted(prepared)[1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("end_positions", [(8, 13), (12, 12), (17, 18), (99, 99)])
def test_rows_end_at_different_steps(end_positions, late, pair, request):
    """Rows end at different steps, at the same step, at the last step, or never.

    With the deferred stop check, no extra token is returned.
    """
    if late:
        request.getfixturevalue("ends_checked_late")
    prepared, stock = pair()
    free = generate(stock, **VARIED)
    never = next(token for token in range(3, 61) if token not in free)
    ends = [row[place].item() if place < 19 else never for row, place in zip(free, end_positions, strict=True)]
    options = {"eos_token_id": ends, "pad_token_id": 0, **VARIED}
    for _ in range(2):
        expected = generate(stock, **options)
        assert torch.equal(generate(prepared, **options), expected)
    first = [next((place for place in range(7, 19) if row[place] in ends), 18) for row in free]
    assert expected.shape[1] == max(first) + 1


def test_the_extra_step_of_the_deferred_check_is_not_observable(pair, ends_checked_late):
    """A user's criterion is called once per token, and sampling draws as many numbers as in stock transformers."""
    prepared, stock = pair()

    class Counting(transformers.StoppingCriteria):
        calls = 0

        def __call__(self, ids, scores, **_):
            self.calls += 1
            return torch.full((len(ids),), ids.shape[1] >= 12, device=ids.device)

    calls = []
    for model in (prepared, stock):
        own = Counting()
        generate(model, stopping_criteria=transformers.StoppingCriteriaList([own]))
        calls.append(own.calls)
    assert calls[0] == calls[1] == 5
    ends = generate(stock, seed=0, do_sample=True)[0, 14].item()
    drawn = []
    for model in (prepared, stock):
        generate(model, prompt(rows=1), seed=0, do_sample=True, eos_token_id=ends)
        drawn.append(torch.rand(2))
    assert torch.equal(*drawn)


def test_each_batch_size_is_recorded_once(pair):
    prepared, stock = pair()
    for rows in (1, 3, 2, 1, 3):
        inputs = prompt(rows=rows, seed=rows)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert counted(prepared) == (3, 3 * (11 - FIRST) + 2 * 11)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_caches_and_recordings_are_reused(kind, pair):
    prepared, stock = pair(kind)
    for seed, padded in ((1, 0), (2, 0), (3, 4)):
        inputs = prompt(seed=seed, padded=padded)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert known(prepared).pool.summary()[0] == 1
    recordings, replayed = counted(prepared)
    # Padding changes the mask, which may need another recording.
    assert recordings <= 2 and replayed >= 2 * 11 - FIRST


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_buffers_grow_with_the_number_of_tokens(kind, pair):
    """The buffers grow within a call, and a longer call gets a larger cache."""
    prepared, stock = pair(kind)
    for new in (8, 70, 120):
        assert torch.equal(generate(prepared, new=new), generate(stock, new=new))
    assert counted(prepared)[1] > 120


def test_two_models_decode_in_four_threads(pair):
    prepared, stock = pair()
    other, other_stock = pair("qwen3")
    calls = [(prepared, stock, 1), (prepared, stock, 2), (other, other_stock, 3), (prepared, stock, 2)]
    expected = [generate(model, prompt(seed=seed)) for _, model, seed in calls]
    result = [[] for _ in calls]

    def work(index):
        for _ in range(3):
            result[index].append(generate(calls[index][0], prompt(seed=calls[index][2])))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for reference, entry in zip(expected, result, strict=True):
        assert len(entry) == 3 and all(torch.equal(reference, tokens) for tokens in entry)
    assert counted(prepared)[0] <= 3 and counted(other)[1] == 3 * 11 - FIRST
    assert sum(counted(prepared)) >= 9 * 11 - 3 * FIRST


def test_inference_mode_and_no_grad_share_recordings(pair):
    prepared, stock = pair()
    expected = generate(stock)
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert torch.equal(generate(prepared), expected)
    assert counted(prepared)[1] >= 2 * 11 - FIRST
