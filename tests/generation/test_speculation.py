"""Drafts are verified with recorded steps, one for each number of drafts. Tokens and random draws equal stock's."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.generation import candidate_generator

import hf_rocm
from hf_rocm import patches
from hf_rocm.generation import cache_layer, recorder
from hf_rocm.generation import inputs as preparation
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.runner import Runner
from hf_rocm.generation.state import known
from hf_rocm.ops.captured import in_captured_block
from tests.generation import faults
from tests.generation.conftest import Streamer, alike_from_threads, assistant_of, counted, generate, prompt
from tests.generation.test_user_caches import assert_caches_close, close

NEW = 40
# An EOS token beyond the vocabulary: stock before 5.0 fails without one.
NEVER = 61
KINDS = ["llama", "mistral", "gemma2", "gemma3"]


def before(version):
    return Version(transformers.__version__) < Version(version)


def repeating(seed=0, padded=0, length=11):
    """A prompt of one row, whose tokens are repeated so that a lookup drafts some tokens."""
    ids = torch.cat([prompt(rows=1, length=length, seed=seed)["input_ids"]] * 2, dim=1)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def looked_up(model, inputs, seed=0, *, tokens=4, **arguments):
    arguments = {"new": NEW, "eos_token_id": NEVER, "prompt_lookup_num_tokens": tokens, **arguments}
    return generate(model, inputs, seed=seed, **arguments)


def equals_greedy(tokens, stock, inputs):
    """Whether these are the tokens of greedy decoding. Before 5.14, the last draft may exceed the maximum length."""
    expected = generate(stock, inputs, new=NEW)
    excess = tokens.shape[1] - expected.shape[1]
    return torch.equal(tokens[:, : expected.shape[1]], expected) and (excess == 0 or before("5.14"))


@pytest.fixture
def drafted(monkeypatch):
    """The number of tokens of every draft so far."""
    counts = []
    for name in ("PromptLookupCandidateGenerator", "AssistedCandidateGenerator"):
        kind = getattr(candidate_generator, name)

        def get_candidates(self, input_ids, *args, stock=kind.get_candidates, **kwargs):
            result = stock(self, input_ids, *args, **kwargs)
            counts.append(result[0].shape[1] - input_ids.shape[1])
            return result

        monkeypatch.setattr(kind, "get_candidates", get_candidates)
    return counts


def steps_of(model):
    """The recorded steps that use the cache of the model's last call."""
    recordings = known(model).pool._idle[-1].cache.recordings.values()
    return [step for step in recordings if isinstance(step, RecordedStep)]


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_greedy_decoding(kind, tokens, pair):
    prepared, stock = pair(kind)
    for seed in range(3):
        inputs = repeating(seed, padded=3 * (seed % 2))
        with torch.inference_mode(seed == 1):
            result = looked_up(prepared, inputs, tokens=tokens)
        assert equals_greedy(result, stock, inputs)
    assert counted(prepared)[1] > 1


def test_the_last_step_of_a_call_is_recorded_in_a_later_call(pair, monkeypatch):
    """The last step often has a number of drafts that no other step of the call has."""
    uncaptured = []
    run = Runner._run
    monkeypatch.setattr(Runner, "_run", lambda self, *args: uncaptured.append(args) or run(self, *args))
    prepared, stock = pair()
    # Buffers may grow in the first call, and steps are then recorded again.
    for _ in range(3):
        uncaptured.clear()
        assert equals_greedy(looked_up(prepared, repeating(1)), stock, repeating(1))
    uncaptured.clear()
    assert equals_greedy(looked_up(prepared, repeating(1)), stock, repeating(1))
    assert not uncaptured


@pytest.fixture
def in_place(monkeypatch):
    """The number of tokens of every step whose inputs were advanced in place."""
    counts, take = [], preparation.Step.inputs

    def counting(step, cache, input_ids):
        counts.append(step.tokens(input_ids))
        return take(step, cache, input_ids)

    monkeypatch.setattr(preparation.Step, "inputs", counting)
    return counts


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_step_reads_its_inputs_in_place(kind, pair, drafted, in_place):
    prepared, stock = pair(kind)
    recorded = []
    # Buffers may grow in the first round; a step that occurs once in a call is recorded in the next.
    for _ in range(4):
        for seed, padded in itertools.product(range(2), (0, 3)):
            drafted.clear()
            in_place.clear()
            call = repeating(seed, padded=padded)
            assert equals_greedy(looked_up(prepared, call), stock, call)
            # All steps except the prompt's are prepared in place.
            assert in_place == [drafts + 1 for drafts in drafted[1:]]
        recorded.append(counted(prepared)[0])
    # Alternating the padding records nothing new.
    assert recorded[2] == recorded[3] > 1


def test_transformers_prepares_steps_while_a_mask_function_is_replaced(pair, monkeypatch, drafted, in_place):
    """While a mask function is replaced, transformers receives the arguments that it would have computed itself."""
    prepared, stock = pair(graphs=None)
    for seed in range(3):
        reasons = itertools.cycle((None, None, "replaced"))
        monkeypatch.setattr(preparation, "masks_replaced", lambda model, reasons=reasons: next(reasons))
        call = repeating(seed, padded=seed)
        in_place.clear()
        drafted.clear()
        assert equals_greedy(looked_up(prepared, call), stock, call)
        assert 3 < len(in_place) < len(drafted) - 2
    assert counted(prepared)[1] > 0


def test_a_mask_with_a_gap_is_prepared_by_transformers(pair, in_place):
    """transformers prepares every step of a call whose mask has a gap, but only the first step of the next call."""
    prepared, stock = pair()
    call = repeating()
    call["attention_mask"][0, 4] = 0
    assert equals_greedy(looked_up(prepared, call), stock, call)
    assert not in_place and preparation.noted(prepared) is not None
    assert equals_greedy(looked_up(prepared, repeating()), stock, repeating())
    assert in_place and preparation.noted(prepared) is None


def test_each_number_of_drafts_has_a_recording(pair, drafted):
    prepared, stock = pair()
    counts, results = [], []
    for model in (prepared, stock):
        results.append([looked_up(model, repeating(seed)) for seed in range(4)])
        counts.append(list(drafted))
        drafted.clear()
    assert all(map(torch.equal, *results)) and counts[0] == counts[1]
    # Tokens per step, from the logits' shape.
    lengths = [step.tensors[0].shape[1] for step in steps_of(prepared)]
    assert len(lengths) > 2 and {length - 1 for length in lengths} <= set(counts[0])
    assert counted(prepared)[1] > len(counts[0]) / 2 and known(prepared).turned_away == {}


@pytest.mark.parametrize("arguments", [{}, {"repetition_penalty": 0.8}, {"eos_token_id": [5, 17, 40]}])
def test_sampling_draws_the_same_random_numbers_as_stock(arguments, pair, drafted):
    prepared, stock = pair()
    for seed in range(4):
        settings = {"do_sample": True, "top_k": 3, "temperature": 0.6, **arguments}
        calls = [looked_up(model, repeating(seed), seed, **settings) for model in (prepared, stock)]
        assert torch.equal(*calls)
    assert max(drafted) > 0 and counted(prepared)[1] > 0


@pytest.mark.parametrize("sampled", [False, True])
def test_returned_outputs_equal_stock(sampled, pair):
    prepared, stock = pair()
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": sampled}
    for seed in range(3):
        inputs = repeating(seed, padded=2)
        actual, expected = (
            looked_up(model, inputs, seed, repetition_penalty=0.9, **settings) for model in (prepared, stock)
        )
        assert type(actual) is type(expected) and list(actual) == list(expected)
        assert torch.equal(actual.sequences, expected.sequences)
        for part in ("scores", "logits"):
            ones, others = torch.stack(actual[part]), torch.stack(expected[part])
            close(ones.nan_to_num(neginf=0), others.nan_to_num(neginf=0))
        assert_caches_close(actual.past_key_values, expected.past_key_values)
    assert counted(prepared)[1] > NEW / 2


def test_a_streamer_receives_the_same_values_as_in_stock(pair):
    prepared, stock = pair()
    for seed in range(2):
        streamers = Streamer(), Streamer()
        for model, streamer in zip((prepared, stock), streamers, strict=True):
            looked_up(model, repeating(seed), streamer=streamer)
        assert streamers[0].values == streamers[1].values
    assert counted(prepared)[1] > 0


@pytest.mark.parametrize("schedule", [None, "heuristic"])
@pytest.mark.parametrize("sampled", [False, True])
def test_assistant_models_draft_as_in_stock(sampled, schedule, pair, drafted):
    prepared, stock = pair()
    assistants = [assistant_of(stock, schedule) for _ in range(2)]
    for seed in range(2):
        results, lengths = [], []
        for model, assistant in zip((prepared, stock), assistants, strict=True):
            drafted.clear()
            settings = {"assistant_model": assistant, "do_sample": sampled}
            results.append(generate(model, repeating(seed), seed=seed, new=NEW, **settings))
            lengths.append(list(drafted))
        assert torch.equal(*results) and lengths[0] == lengths[1]
        if not sampled:
            assert torch.equal(results[0], generate(stock, repeating(seed), new=NEW))
    first, second = (vars(assistant.generation_config) for assistant in assistants)
    assert {**first, "_eos_token_tensor": None} == {**second, "_eos_token_tensor": None}
    assert counted(prepared)[1] > 0 and known(prepared).turned_away == {}


def test_long_drafts_run_uncaptured(pair):
    prepared, stock = pair(graphs=None)
    assistant = assistant_of(stock, "constant", noise=0)
    assistant.generation_config.num_assistant_tokens = 25
    inputs = repeating()
    assert torch.equal(generate(prepared, inputs, new=90, assistant_model=assistant), generate(stock, inputs, new=90))
    assert known(prepared).turned_away["a step verifies more than 20 drafted tokens"] > 1


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_calls_with_and_without_drafts_alternate(kind, pair):
    prepared, stock = pair(kind)
    for seed in range(3):
        inputs = repeating(seed)
        assert torch.equal(generate(prepared, inputs, new=NEW), generate(stock, inputs, new=NEW))
        assert equals_greedy(looked_up(prepared, inputs), stock, inputs)
    recorded = counted(prepared)[0]
    for seed in range(3):
        generate(prepared, repeating(seed), new=NEW)
    assert counted(prepared)[0] == recorded


FAULTS = [faults.garbage, faults.node_dropped, faults.stale_input, faults.stale_mask, faults.stale_positions]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_replay_is_detected_and_the_call_is_restarted(fault, pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(fault, first=4))
    prepared, stock = pair(graphs=None)
    for seed in range(4):
        settings = {"do_sample": bool(seed % 2)}
        assert torch.equal(
            looked_up(prepared, repeating(), seed, **settings), looked_up(stock, repeating(), seed, **settings)
        )
    assert "differed from the step itself" in known(prepared).disabled


def test_a_wrong_replay_with_an_assistant_is_detected(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(faults.garbage, first=4))
    prepared, stock = pair(graphs=None)
    assistants = [assistant_of(stock, noise=0.1) for _ in range(2)]
    expected = generate(stock, repeating(), new=2 * NEW, assistant_model=assistants[1])
    result = generate(prepared, repeating(), new=2 * NEW, assistant_model=assistants[0])
    assert torch.equal(result, expected)
    numbers = [assistant.generation_config.num_assistant_tokens for assistant in assistants]
    assert numbers[0] == numbers[1]
    assert "differed from the step itself" in known(prepared).disabled


def test_comparisons_run_the_kernels_of_the_recording(pair, monkeypatch):
    prepared, _ = pair()
    stock, captured = type(prepared).forward, []

    def forward(self, *args, **kwargs):
        captured.append(in_captured_block())
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(type(prepared), "forward", forward)
    monkeypatch.setattr(hf_rocm.generation.watch, "KNOWN", hf_rocm.generation.watch.KNOWN | {"tests"})
    looked_up(prepared, repeating())
    assert set(captured) == {False, True}


def test_calls_that_cannot_be_recorded_run_as_in_stock(pair):
    from transformers import DynamicCache

    prepared, stock = pair(graphs=None)
    inputs = repeating()
    expected = looked_up(stock, inputs)
    assert torch.equal(looked_up(prepared, inputs, past_key_values=DynamicCache()), expected)
    assert "the call passes a cache, and rejected drafts are removed from it" in known(prepared).turned_away
    # Stock fails in 5.0 to 5.2.
    if before("5.0") or not before("5.3"):
        assert torch.equal(generate(prepared, inputs, new=NEW, assistant_early_exit=1), expected)
        assert "assistant_early_exit changes the model's config during the call" in known(prepared).turned_away
    sliding, _ = pair("mistral", graphs=None)
    if before("4.54"):
        # No cache layer of this release discards keys.
        return
    if before("4.56") or not before("5.14"):
        result = generate(sliding, inputs, new=NEW, assistant_model=assistant_of(stock))
        assert torch.equal(result, generate(sliding, inputs, new=NEW))
        reason = (
            "an assistant may draft any number of tokens, and sliding windows would have to keep that many more keys"
        )
        assert reason in known(sliding).turned_away
    if not before("5.14"):
        looked_up(sliding, inputs, return_dict_in_generate=True)
        reason = "the call returns a cache with sliding windows, from which rejected drafts can't be removed"
        assert reason in known(sliding).turned_away


def test_threads_look_up_concurrently(pair):
    prepared, stock = pair()
    inputs = [repeating(seed) for seed in range(4)]
    expected = [looked_up(stock, call) for call in inputs]
    assert alike_from_threads(lambda call: looked_up(prepared, call, seed=None), inputs, expected)


def test_the_class_is_stock_again_after_a_call(pair):
    prepared, stock = pair()
    looked_up(prepared, repeating())
    assert "__call__" not in vars(type(prepared))
    hf_rocm.restore(prepared)
    assert patches.of(prepared) == [] and torch.equal(looked_up(prepared, repeating()), looked_up(stock, repeating()))


def test_rejected_drafts_leave_room_in_windows(pair, monkeypatch):
    """Drafts are longer than the number of spare rows in a window's buffer."""
    monkeypatch.setattr(cache_layer, "SLACK", 2)
    prepared, stock = pair("mistral")
    for seed in range(3):
        inputs = repeating(seed, length=20)
        assert equals_greedy(looked_up(prepared, inputs, tokens=15), stock, inputs)
    assert counted(prepared)[1] > 0


def test_a_prompt_of_embeddings_runs_as_in_stock(pair):
    prepared, stock = pair(graphs=None)
    inputs = repeating(1)
    embeddings = stock.get_input_embeddings()(inputs.pop("input_ids")).detach()
    inputs["inputs_embeds"] = embeddings
    prompts = [{**inputs, "input_ids": repeating(1)["input_ids"]}]
    # Before 5.14, stock fails without token ids.
    if not before("5.14"):
        prompts.append(inputs)
    for call in prompts:
        assert torch.equal(*(looked_up(model, call) for model in (prepared, stock)))
    assert sum(count for reason, count in known(prepared).turned_away.items() if "embeddings" in reason) == len(prompts)
