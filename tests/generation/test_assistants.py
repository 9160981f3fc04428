"""An assistant's steps are recorded with one cache for all rounds of a call; drafts, tokens and draws equal stock's."""

from __future__ import annotations

import copy

import pytest
import tokenizers
import torch
import transformers

import hf_rocm
from hf_rocm import patches
from hf_rocm.errors import GraphError
from hf_rocm.generation import assistant as assisting
from hf_rocm.generation import cache_layer
from hf_rocm.generation import inputs as preparation
from hf_rocm.generation.hybrid import RECURRENT
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.runner import Runner
from hf_rocm.generation.state import known
from tests.generation import faults
from tests.generation.conftest import Streamer, alike_from_threads, assistant_of, counted, generate, make, prompt
from tests.generation.test_speculation import before, repeating, steps_of

NEW = 40


@pytest.fixture
def trio(pair):
    """A function that returns ((a prepared model, a prepared assistant), (the stock model, the stock assistant))."""

    def build(kind="llama", *, schedule="heuristic", noise=0.02, graphs=True):
        prepared, stock = pair(kind, graphs=graphs)
        assistant = assistant_of(stock, schedule, noise)
        return (prepared, hf_rocm.prepare(copy.deepcopy(assistant), force=True, graphs=graphs)), (stock, assistant)

    return build


def assisted(models, inputs, seed=0, *, new=NEW, **arguments):
    model, assistant = models
    return generate(model, inputs, seed=seed, new=new, assistant_model=assistant, **arguments)


@pytest.fixture
def in_place(monkeypatch):
    """The number of tokens in every assistant step whose inputs were advanced in place."""
    counts, original = [], preparation.Step.inputs

    def counting(step, cache, input_ids):
        if assisting._thread.rounds.cache is cache:
            counts.append(step.tokens(input_ids))
        return original(step, cache, input_ids)

    monkeypatch.setattr(preparation.Step, "inputs", counting)
    return counts


def watched(model):
    """Return a list to which the length of every draft of this model will be appended."""
    drafted, inherited = [], model.generate

    def generate(*args, **kwargs):
        result = inherited(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            drafted.append(len(result.scores))
        return result

    model.generate = generate
    return drafted


def settings(model):
    return {**vars(model.generation_config), "_eos_token_tensor": None}


@pytest.mark.parametrize("schedule", [None, "heuristic"])
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_tokens_and_draws_equal_stock(sampled, schedule, trio):
    prepared_pair, stock_pair = trio(schedule=schedule)
    drafted = [watched(assistant) for _, assistant in (prepared_pair, stock_pair)]
    for seed in range(3):
        inputs = [repeating(seed), repeating(seed, padded=3), prompt(rows=1, length=1, seed=seed)][seed]
        results, states = [], []
        for models in (prepared_pair, stock_pair):
            results.append(assisted(models, inputs, seed, do_sample=sampled))
            states.append(torch.get_rng_state())
        assert torch.equal(*results) and torch.equal(*states) and drafted[0] == drafted[1]
        if not sampled:
            assert torch.equal(results[0], generate(stock_pair[0], inputs, new=NEW))
    assert settings(prepared_pair[1]) == settings(stock_pair[1])
    for model in prepared_pair:
        assert counted(model)[1] > 0 and known(model).turned_away == {} and known(model).calls == 3


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_rejected_drafts_lose_no_keys_of_a_window(kind, pair):
    """Windows move while an assistant drafts, and its drafts are longer than the spare rows of its buffers."""
    prepared, stock = pair()
    assistant = make(kind)
    # With equal weights, some drafts are accepted.
    if kind == "mistral":
        assistant.load_state_dict(stock.state_dict())
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 9, "constant"
    config.assistant_confidence_threshold = 0.0
    prepared_assistant = hf_rocm.prepare(copy.deepcopy(assistant), force=True, graphs=True)
    drafted = watched(prepared_assistant), watched(assistant)
    for seed in range(2):
        inputs = repeating(seed, padded=2 * seed, length=7)
        assert torch.equal(assisted((prepared, prepared_assistant), inputs), assisted((stock, assistant), inputs))
        assert drafted[0] == drafted[1]
    assert counted(prepared_assistant)[1] > NEW and known(prepared_assistant).turned_away == {}


def test_every_step_reads_its_inputs_in_place(trio, in_place):
    prepared_pair, stock_pair = trio()
    drafted = watched(prepared_pair[1])
    for seed in range(2):
        # with padding, because from 5.0 on transformers derives the mask of an unpadded prompt from the tokens
        inputs = repeating(seed, padded=2)
        drafted.clear()
        in_place.clear()
        assert torch.equal(assisted(prepared_pair, inputs), generate(stock_pair[0], inputs, new=NEW))
        # all steps except the prompt's
        assert len(in_place) == sum(drafted) - 1 and in_place.count(2) == len(drafted) - 1
    assert preparation.noted(prepared_pair[1]) is None


def test_later_calls_replay_the_same_recordings(trio):
    prepared_pair, _ = trio(schedule="constant")
    counts = []
    for seed in range(5):
        assisted(prepared_pair, repeating(seed % 2, padded=2 + seed % 2))
        counts.append(counted(prepared_pair[1])[0])
    state = known(prepared_pair[1])
    assert counts[1] == counts[-1] and state.pool.summary()[0] == 1
    lengths = {step.tensors[0].shape[1] for step in steps_of(prepared_pair[1])}
    # A step has one token or two, but the model computes logits only for the last token.
    assert lengths == {1} and len(steps_of(prepared_pair[1])) <= 4


def test_a_model_drafts_for_itself(pair):
    prepared, stock = pair()
    for model in (prepared, stock):
        model.generation_config.num_assistant_tokens = 4
        model.generation_config.assistant_confidence_threshold = 0.0
    drafted = watched(prepared)
    for seed in range(2):
        inputs = repeating(seed)
        drafted.clear()
        assert torch.equal(assisted((prepared, prepared), inputs), generate(stock, inputs, new=NEW))
        # Most drafts are accepted.
        assert len(drafted) < NEW / 2
    assert known(prepared).pool.summary()[0] == 2 and counted(prepared)[1] > NEW


@pytest.fixture
def faulty(monkeypatch, tmp_path):
    """A function that injects a fault into the replays of one model."""
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    inherited = Runner._recorder

    def set_fault(model, fault, **options):
        def recorder(self, device):
            if self._state is known(model):
                return self.cache.recordings.setdefault("recorder", faults.recorder_with(fault, **options)(device))
            return inherited(self, device)

        monkeypatch.setattr(Runner, "_recorder", recorder)

    return set_fault


FAULTS = [faults.garbage, faults.node_dropped, faults.stale_input, faults.stale_mask, faults.stale_positions]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_draft_is_detected_and_the_call_begins_again(fault, sampled, trio, faulty):
    prepared_pair, stock_pair = trio(graphs=None)
    faulty(prepared_pair[1], fault, first=4)
    for seed in range(2):
        results = [assisted(models, repeating(seed), seed, do_sample=sampled) for models in (prepared_pair, stock_pair)]
        assert torch.equal(*results) and settings(prepared_pair[1]) == settings(stock_pair[1])
    assert "differed from the step itself" in known(prepared_pair[1]).disabled
    assert known(prepared_pair[0]).disabled is None and counted(prepared_pair[0])[1] > 0


def test_a_wrong_draft_never_reaches_a_streamer(trio, faulty):
    prepared_pair, stock_pair = trio(graphs=None)
    faulty(prepared_pair[1], faults.garbage, first=6)
    streamers = Streamer(), Streamer()
    for models, streamer in zip((prepared_pair, stock_pair), streamers, strict=True):
        assisted(models, repeating(), streamer=streamer)
    assert streamers[0].values == streamers[1].values and known(prepared_pair[1]).disabled is not None


def test_nonfinite_drafts_are_detected(trio, faulty):
    """At the end of a call, the step's alarm reports values that are not finite."""
    prepared_pair, stock_pair = trio(graphs=None, schedule="constant")
    faulty(prepared_pair[1], faults.garbage, first=10**9)
    for seed in range(2):
        assisted(prepared_pair, repeating(seed))
    step = next(one for one in steps_of(prepared_pair[1]) if isinstance(one, RecordedStep) and one.schedule.proven)
    step.schedule.since, step.alarm.number = 1, step.alarm.number * float("nan")
    assert torch.equal(assisted(prepared_pair, repeating()), assisted(stock_pair, repeating()))
    assert known(prepared_pair[1]).disabled is not None and known(prepared_pair[0]).disabled is None


def test_a_fault_in_a_draft_that_is_not_compared_only_lowers_the_acceptance_rate(trio, faulty, monkeypatch):
    prepared_pair, stock_pair = trio(graphs=None)
    faulty(prepared_pair[1], faults.garbage, first=2)
    monkeypatch.setattr("hf_rocm.generation.schedule.Schedule.due", property(lambda self: self.replays == 0))
    monkeypatch.setattr("hf_rocm.generation.recorded_step.Alarm.triggered", lambda self: False)
    for seed in range(2):
        inputs = repeating(seed)
        assert torch.equal(assisted(prepared_pair, inputs), generate(stock_pair[0], inputs, new=NEW))
    assert known(prepared_pair[1]).disabled is None and counted(prepared_pair[1])[1] > NEW


def test_an_exception_in_a_streamer_ends_the_call(trio):
    class Failing:
        def __init__(self):
            self.count = 0

        def put(self, value):
            self.count += 1
            if self.count > 4:
                raise RuntimeError("a streamer fails")

        def end(self):
            pass

    prepared_pair, stock_pair = trio()
    for seed in range(2):
        with pytest.raises(RuntimeError, match="a streamer fails"):
            assisted(prepared_pair, repeating(seed), streamer=Failing())
        assert assisting._thread.rounds is None
        assert torch.equal(assisted(prepared_pair, repeating(seed)), generate(stock_pair[0], repeating(seed), new=NEW))
    assert [known(model).pool.summary()[0] for model in prepared_pair] == [1, 1]


def test_restoring_an_assistant_during_a_call_does_not_change_the_tokens(trio):
    class Restoring:
        def __init__(self, model):
            self.model = model
            self.count = 0

        def put(self, value):
            self.count += 1
            if self.count == 4:
                hf_rocm.restore(self.model)

        def end(self):
            pass

    prepared_pair, stock_pair = trio()
    for streamer in (Restoring(prepared_pair[1]), None):
        result = assisted(prepared_pair, repeating(), streamer=streamer)
        assert torch.equal(result, generate(stock_pair[0], repeating(), new=NEW))


def test_recurrent_states_cannot_discard_drafts(pair):
    prepared, _ = pair()
    rounds = assisting.Rounds(prepared, prepared, limit=64, translated=False, observed=False)
    assert rounds.refuses_windows([None, RECURRENT]) is not None and rounds.refuses_windows([None, 8]) is None


def test_assistants_that_cannot_be_recorded_draft_uncaptured(pair, trio):
    prepared, stock = pair(graphs=None)
    expected = generate(stock, repeating(), new=NEW)
    plain = assistant_of(stock)
    # The assistant is not prepared.
    assert torch.equal(assisted((prepared, plain), repeating()), expected)
    assert "uncaptured × 1: drafts of an assistant model that is not prepared" in hf_rocm.explain(prepared).details()

    prepared_assistant = hf_rocm.prepare(assistant_of(stock), force=True)
    # The main model is not prepared.
    assert torch.equal(assisted((stock, prepared_assistant), repeating()), expected)
    assert set(known(prepared_assistant).turned_away) == {
        "the model that it drafts for is not prepared, or runs uncaptured in this call"
    }

    prepared_assistant = hf_rocm.prepare(assistant_of(stock), force=True)
    handle = prepared_assistant.model.layers[0].register_forward_hook(lambda *_: None)
    for seed in range(2):
        assert torch.equal(
            assisted((prepared, prepared_assistant), repeating(seed)), generate(stock, repeating(seed), new=NEW)
        )
    # The reason is counted once per call.
    assert known(prepared_assistant).turned_away == {"a replay would not run the hook of model.layers.0": 2}
    handle.remove()
    assert (
        torch.equal(assisted((prepared, prepared_assistant), repeating()), expected)
        and counted(prepared_assistant)[1] > 0
    )

    prepared_assistant = hf_rocm.prepare(assistant_of(stock), force=True, graphs=True)
    with pytest.raises(GraphError, match="can't decode with graphs"):
        assisted((stock, prepared_assistant), repeating())


def test_threads_share_an_assistant(trio):
    prepared_pair, stock_pair = trio(schedule="constant")
    inputs = [repeating(seed) for seed in range(3)]
    expected = [generate(stock_pair[0], call_inputs, new=NEW) for call_inputs in inputs]
    assert alike_from_threads(lambda call_inputs: assisted(prepared_pair, call_inputs, seed=None), inputs, expected)


def test_the_classes_are_stock_again_after_a_call(trio):
    prepared_pair, stock_pair = trio()
    assisted(prepared_pair, repeating())
    assert "__call__" not in vars(type(prepared_pair[0]))
    for model in prepared_pair:
        hf_rocm.restore(model)
        assert patches.of(model) == []
    assert torch.equal(assisted(prepared_pair, repeating()), assisted(stock_pair, repeating()))


def tokenizer(first=0, additional=0):
    """A tokenizer of 58 words. first: the index of the word with the lowest id. additional: number of further words."""
    names = [f"w{number}" for number in range(3, 61)]
    words = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2}
    names = names[first:] + names[:first] + [f"x{number}" for number in range(additional)]
    words |= {name: number for number, name in enumerate(names, 3)}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="[PAD]", bos_token="[BOS]", unk_token="[UNK]"
    )


def test_an_assistant_with_another_tokenizer_drafts_as_in_stock(pair, monkeypatch):
    monkeypatch.setattr(cache_layer, "SLACK", 2)
    prepared, stock = pair()
    assistant = assistant_of(make("llama", vocab_size=66), noise=0)
    prepared_assistant = hf_rocm.prepare(copy.deepcopy(assistant), force=True, graphs=True)
    tokenizers_of_call = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(7, additional=5)}
    for seed in range(2):
        results = [
            assisted(models, repeating(seed), **tokenizers_of_call)
            for models in ((prepared, prepared_assistant), (stock, assistant))
        ]
        assert torch.equal(*results) and torch.equal(results[0], generate(stock, repeating(seed), new=NEW))
    assert counted(prepared_assistant)[1] > 0 and known(prepared_assistant).turned_away == {}
    sampling = hf_rocm.prepare(make("llama", vocab_size=66), force=True)
    assisted((prepared, sampling), repeating(), do_sample=True, **tokenizers_of_call)
    assert any("sampling with another tokenizer" in reason for reason in known(sampling).turned_away)
    sliding = hf_rocm.prepare(make("mistral", vocab_size=66), force=True)
    if not before("4.54"):
        assert torch.equal(
            assisted((prepared, sliding), repeating(), **tokenizers_of_call), generate(stock, repeating(), new=NEW)
        )
        assert any("another tokenizer" in reason for reason in known(sliding).turned_away)
