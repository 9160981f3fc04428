"""Beam search with recorded steps returns stock's sequences and scores. Replays work for any reordering of beams."""

from __future__ import annotations

import pytest
import torch

import hf_rocm
from hf_rocm import patches
from hf_rocm.generation import recorder
from hf_rocm.generation.state import known
from tests.generation import faults
from tests.generation.conftest import alike_from_threads, counted, generate, prompt
from tests.generation.test_encoder_decoder import SIZES, couple, make_inputs  # noqa: F401  a fixture
from tests.generation.test_user_caches import assert_caches_close, close

NEW = 20
KINDS = ["llama", "mistral", "gemma2", "gemma3"]
SEARCHES = {
    "plain": {},
    "more beams": {"num_beams": 5, "num_return_sequences": 3},
    "ends": {"eos_token_id": [5, 17, 40, 41], "early_stopping": True},
    "never early": {"eos_token_id": [5, 17], "early_stopping": "never", "length_penalty": 2.0},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.2},
}


def searched(model, inputs, seed=0, **arguments):
    return generate(model, inputs, seed=seed, **{"new": NEW, "num_beams": 3, **arguments})


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_those_of_stock(kind, search, pair):
    prepared, stock = pair(kind)
    for seed, padded in ((0, 0), (1, 3), (2, 0)):
        inputs = prompt(rows=3, seed=seed, padded=padded)
        calls = [searched(model, inputs, seed, **SEARCHES[search]) for model in (prepared, stock)]
        assert torch.equal(*calls)
    assert counted(prepared)[1] > NEW


def test_all_steps_after_the_first_three_are_replayed(pair):
    prepared, stock = pair()
    for seed in (0, 1):
        inputs = prompt(seed=seed)
        assert torch.equal(searched(prepared, inputs), searched(stock, inputs))
    assert counted(prepared) == (1, 2 * (NEW - 1) - 3)
    assert known(prepared).turned_away == {}


@pytest.mark.parametrize("kind", KINDS)
def test_returned_outputs_equal_stock(kind, pair):
    prepared, stock = pair(kind)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for seed in (0, 1):
        inputs = prompt(padded=2, seed=seed)
        actual, expected = searched(prepared, inputs, **options), searched(stock, inputs, **options)
        assert type(actual) is type(expected) and list(actual) == list(expected)
        assert torch.equal(actual.sequences, expected.sequences) and torch.equal(
            actual.beam_indices, expected.beam_indices
        )
        close(actual.sequences_scores, expected.sequences_scores)
        for part in ("scores", "logits"):
            ones, others = torch.stack(actual[part]), torch.stack(expected[part])
            close(ones.nan_to_num(neginf=0), others.nan_to_num(neginf=0))
        assert_caches_close(actual.past_key_values, expected.past_key_values)
    assert counted(prepared)[1] > NEW


@pytest.mark.parametrize("kind", SIZES)
def test_beam_search_of_encoder_decoder_models_equals_stock(kind, couple):  # noqa: F811
    prepared, stock = couple(kind)
    for seed, arguments in enumerate(({}, {"num_return_sequences": 2}, {"eos_token_id": [5, 17, 40]})):
        inputs = make_inputs(kind, seed=seed)
        options = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False, **arguments}
        assert torch.equal(prepared.generate(**inputs, **options), stock.generate(**inputs, **options))
    assert counted(prepared)[1] > NEW


def test_beam_searches_and_greedy_calls_share_a_recording(pair):
    prepared, stock = pair()
    for seed, beams in enumerate((3, 1, 2, 3, 1)):
        inputs = prompt(rows=6 // beams if beams > 1 else 6, seed=seed)
        calls = [searched(model, inputs, num_beams=beams) for model in (prepared, stock)]
        assert torch.equal(*calls)
    # All calls have 6 rows, so beam search and greedy calls share a recording.
    assert counted(prepared) == (1, 5 * (NEW - 1) - 3)


def test_a_passed_cache_runs_as_in_stock(pair):
    from transformers import DynamicCache

    prepared, stock = pair(graphs=None)
    inputs = prompt(rows=1)
    calls = [searched(model, inputs, past_key_values=DynamicCache(), num_beams=2) for model in (prepared, stock)]
    assert torch.equal(*calls)
    assert "the call passes a cache, and beam search reorders its rows" in known(prepared).turned_away


@pytest.mark.parametrize("fault", [faults.garbage, faults.node_dropped, faults.stale_input])
def test_a_wrong_replay_is_detected_and_the_search_begins_again(fault, pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(fault, first=6))
    prepared, stock = pair(graphs=None)
    inputs = prompt()
    assert torch.equal(searched(prepared, inputs, new=40), searched(stock, inputs, new=40))
    assert "differed from the step itself" in known(prepared).disabled
    assert torch.equal(searched(prepared, inputs), searched(stock, inputs))


def test_other_calls_of_the_model_during_a_search_are_not_mistaken_for_its_steps(pair):
    """A user's logits processor calls the model, as a processor for guidance does."""
    from transformers import LogitsProcessor, LogitsProcessorList

    prepared, stock = pair()

    class Guided(LogitsProcessor):
        def __init__(self, model):
            self.model = model

        def __call__(self, input_ids, scores):
            return scores + 0.1 * self.model(input_ids[:, -4:]).logits[:, -1]

    calls = [
        searched(model, prompt(), logits_processor=LogitsProcessorList([Guided(model)])) for model in (prepared, stock)
    ]
    assert torch.equal(*calls)
    assert counted(prepared)[1] > 0


def test_threads_search_concurrently(pair):
    prepared, stock = pair()
    inputs = [prompt(seed=seed) for seed in range(4)]
    expected = [searched(stock, call_inputs) for call_inputs in inputs]
    assert alike_from_threads(lambda call_inputs: searched(prepared, call_inputs), inputs, expected)


def test_the_class_is_stock_again_after_a_search(pair):
    prepared, stock = pair()
    searched(prepared, prompt())
    assert "__call__" not in vars(type(prepared))
    with pytest.raises(RuntimeError, match="stop"):
        searched(prepared, prompt(), logits_processor=[lambda ids, scores: (_ for _ in ()).throw(RuntimeError("stop"))])
    assert "__call__" not in vars(type(prepared))
    hf_rocm.restore(prepared)
    assert patches.of(prepared) == [] and torch.equal(searched(prepared, prompt()), searched(stock, prompt()))


@pytest.mark.parametrize("fault", [faults.copy_dropped, faults.stale_order])
def test_a_wrong_reordering_is_detected_and_the_search_begins_again(fault, pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(fault, first=4, reorderings=True))
    prepared, stock = pair(graphs=None)
    for seed in range(2):
        inputs = prompt(seed=seed)
        assert torch.equal(searched(prepared, inputs, new=40), searched(stock, inputs, new=40))
    assert known(prepared).disabled == "a replayed reordering of the cache was wrong"
