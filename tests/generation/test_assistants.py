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
        drafting = assistant_of(stock, schedule, noise)
        return (prepared, hf_rocm.prepare(copy.deepcopy(drafting), force=True, graphs=graphs)), (stock, drafting)

    return build


def assisted(models, inputs, seed=0, *, new=NEW, **arguments):
    model, drafting = models
    return generate(model, inputs, seed=seed, new=new, assistant_model=drafting, **arguments)


@pytest.fixture
def in_place(monkeypatch):
    """The number of tokens of every step of an assistant whose inputs were advanced in place."""
    counts, take = [], preparation.Step.inputs

    def counting(step, cache, input_ids):
        if assisting._thread.rounds.cache is cache:
            counts.append(step.tokens(input_ids))
        return take(step, cache, input_ids)

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
    ours, stocks = trio(schedule=schedule)
    drafted = [watched(drafting) for _, drafting in (ours, stocks)]
    for seed in range(3):
        inputs = [repeating(seed), repeating(seed, padded=3), prompt(rows=1, length=1, seed=seed)][seed]
        results, states = [], []
        for models in (ours, stocks):
            results.append(assisted(models, inputs, seed, do_sample=sampled))
            states.append(torch.get_rng_state())
        assert torch.equal(*results) and torch.equal(*states) and drafted[0] == drafted[1]
        if not sampled:
            assert torch.equal(results[0], generate(stocks[0], inputs, new=NEW))
    assert settings(ours[1]) == settings(stocks[1])
    for model in ours:
        assert counted(model)[1] > 0 and known(model).turned_away == {} and known(model).calls == 3


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_rejected_drafts_lose_no_keys_of_a_window(kind, pair):
    """Windows move while an assistant drafts, and its drafts are longer than the spare rows of its buffers."""
    prepared, stock = pair()
    drafting = make(kind)
    # With equal weights, some drafts are accepted.
    if kind == "mistral":
        drafting.load_state_dict(stock.state_dict())
    config = drafting.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 9, "constant"
    config.assistant_confidence_threshold = 0.0
    own = hf_rocm.prepare(copy.deepcopy(drafting), force=True, graphs=True)
    drafted = watched(own), watched(drafting)
    for seed in range(2):
        inputs = repeating(seed, padded=2 * seed, length=7)
        assert torch.equal(assisted((prepared, own), inputs), assisted((stock, drafting), inputs))
        assert drafted[0] == drafted[1]
    assert counted(own)[1] > NEW and known(own).turned_away == {}


def test_every_step_reads_its_inputs_in_place(trio, in_place):
    ours, stocks = trio()
    drafted = watched(ours[1])
    for seed in range(2):
        # with padding, because from 5.0 on transformers derives the mask of an unpadded prompt from the tokens
        inputs = repeating(seed, padded=2)
        drafted.clear()
        in_place.clear()
        assert torch.equal(assisted(ours, inputs), generate(stocks[0], inputs, new=NEW))
        # all steps except the prompt's
        assert len(in_place) == sum(drafted) - 1 and in_place.count(2) == len(drafted) - 1
    assert preparation.noted(ours[1]) is None


def test_later_calls_replay_the_same_recordings(trio):
    ours, _ = trio(schedule="constant")
    counts = []
    for seed in range(5):
        assisted(ours, repeating(seed % 2, padded=2 + seed % 2))
        counts.append(counted(ours[1])[0])
    state = known(ours[1])
    assert counts[1] == counts[-1] and state.pool.summary()[0] == 1
    lengths = {step.tensors[0].shape[1] for step in steps_of(ours[1])}
    # A step has one token or two, but the model computes only the logits of the last one.
    assert lengths == {1} and len(steps_of(ours[1])) <= 4


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

    def set_fault(model, fault, **when):
        def recorder(self, device):
            if self._state is known(model):
                return self.cache.recordings.setdefault("recorder", faults.recorder_with(fault, **when)(device))
            return inherited(self, device)

        monkeypatch.setattr(Runner, "_recorder", recorder)

    return set_fault


FAULTS = [faults.garbage, faults.node_dropped, faults.stale_input, faults.stale_mask, faults.stale_positions]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_draft_is_detected_and_the_call_begins_again(fault, sampled, trio, faulty):
    ours, stocks = trio(graphs=None)
    faulty(ours[1], fault, first=4)
    for seed in range(2):
        results = [assisted(models, repeating(seed), seed, do_sample=sampled) for models in (ours, stocks)]
        assert torch.equal(*results) and settings(ours[1]) == settings(stocks[1])
    assert "differed from the step itself" in known(ours[1]).disabled
    assert known(ours[0]).disabled is None and counted(ours[0])[1] > 0


def test_a_wrong_draft_never_reaches_a_streamer(trio, faulty):
    ours, stocks = trio(graphs=None)
    faulty(ours[1], faults.garbage, first=6)
    streamers = Streamer(), Streamer()
    for models, streamer in zip((ours, stocks), streamers, strict=True):
        assisted(models, repeating(), streamer=streamer)
    assert streamers[0].values == streamers[1].values and known(ours[1]).disabled is not None


def test_nonfinite_drafts_are_detected(trio, faulty):
    """At the end of a call, the step's alarm reports values that are not finite."""
    ours, stocks = trio(graphs=None, schedule="constant")
    faulty(ours[1], faults.garbage, first=10**9)
    for seed in range(2):
        assisted(ours, repeating(seed))
    step = next(one for one in steps_of(ours[1]) if isinstance(one, RecordedStep) and one.schedule.proven)
    step.schedule.since, step.alarm.number = 1, step.alarm.number * float("nan")
    assert torch.equal(assisted(ours, repeating()), assisted(stocks, repeating()))
    assert known(ours[1]).disabled is not None and known(ours[0]).disabled is None


def test_a_fault_in_a_draft_that_is_not_compared_only_lowers_the_acceptance_rate(trio, faulty, monkeypatch):
    ours, stocks = trio(graphs=None)
    faulty(ours[1], faults.garbage, first=2)
    monkeypatch.setattr("hf_rocm.generation.schedule.Schedule.due", property(lambda self: self.replays == 0))
    monkeypatch.setattr("hf_rocm.generation.recorded_step.Alarm.rang", lambda self: False)
    for seed in range(2):
        inputs = repeating(seed)
        assert torch.equal(assisted(ours, inputs), generate(stocks[0], inputs, new=NEW))
    assert known(ours[1]).disabled is None and counted(ours[1])[1] > NEW


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

    ours, stocks = trio()
    for seed in range(2):
        with pytest.raises(RuntimeError, match="a streamer fails"):
            assisted(ours, repeating(seed), streamer=Failing())
        assert assisting._thread.rounds is None
        assert torch.equal(assisted(ours, repeating(seed)), generate(stocks[0], repeating(seed), new=NEW))
    assert [known(model).pool.summary()[0] for model in ours] == [1, 1]


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

    ours, stocks = trio()
    for streamer in (Restoring(ours[1]), None):
        result = assisted(ours, repeating(), streamer=streamer)
        assert torch.equal(result, generate(stocks[0], repeating(), new=NEW))


def test_recurrent_states_cannot_discard_drafts(pair):
    prepared, _ = pair()
    rounds = assisting.Rounds(prepared, prepared, limit=64, translated=False)
    assert rounds.refuses_windows([None, RECURRENT]) is not None and rounds.refuses_windows([None, 8]) is None


def test_assistants_that_cannot_be_recorded_draft_uncaptured(pair, trio):
    prepared, stock = pair(graphs=None)
    expected = generate(stock, repeating(), new=NEW)
    plain = assistant_of(stock)
    # The assistant is not prepared.
    assert torch.equal(assisted((prepared, plain), repeating()), expected)
    assert "uncaptured × 1: drafts of an assistant model that is not prepared" in hf_rocm.explain(prepared).details()

    own = hf_rocm.prepare(assistant_of(stock), force=True)
    # The main model is not prepared.
    assert torch.equal(assisted((stock, own), repeating()), expected)
    assert set(known(own).turned_away) == {
        "the model that it drafts for is not prepared, or runs uncaptured in this call"
    }

    own = hf_rocm.prepare(assistant_of(stock), force=True)
    handle = own.model.layers[0].register_forward_hook(lambda *_: None)
    for seed in range(2):
        assert torch.equal(assisted((prepared, own), repeating(seed)), generate(stock, repeating(seed), new=NEW))
    # The reason is counted once per call.
    assert known(own).turned_away == {"a replay would not run the hook of model.layers.0": 2}
    handle.remove()
    assert torch.equal(assisted((prepared, own), repeating()), expected) and counted(own)[1] > 0

    own = hf_rocm.prepare(assistant_of(stock), force=True, graphs=True)
    with pytest.raises(GraphError, match="can't decode with graphs"):
        assisted((stock, own), repeating())


def test_threads_share_an_assistant(trio):
    ours, stocks = trio(schedule="constant")
    inputs = [repeating(seed) for seed in range(3)]
    expected = [generate(stocks[0], given, new=NEW) for given in inputs]
    assert alike_from_threads(lambda given: assisted(ours, given, seed=None), inputs, expected)


def test_the_classes_are_stock_again_after_a_call(trio):
    ours, stocks = trio()
    assisted(ours, repeating())
    assert "__call__" not in vars(type(ours[0]))
    for model in ours:
        hf_rocm.restore(model)
        assert patches.of(model) == []
    assert torch.equal(assisted(ours, repeating()), assisted(stocks, repeating()))


def tokenizer(first=0, further=0):
    """A tokenizer of 58 words. first: the index of the word with the lowest id. further: number of additional words."""
    names = [f"w{number}" for number in range(3, 61)]
    words = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2}
    names = names[first:] + names[:first] + [f"x{number}" for number in range(further)]
    words |= {name: number for number, name in enumerate(names, 3)}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="[PAD]", bos_token="[BOS]", unk_token="[UNK]"
    )


def test_an_assistant_with_another_tokenizer_drafts_as_in_stock(pair, monkeypatch):
    monkeypatch.setattr(cache_layer, "SLACK", 2)
    prepared, stock = pair()
    drafting = assistant_of(make("llama", vocab_size=66), noise=0)
    own = hf_rocm.prepare(copy.deepcopy(drafting), force=True, graphs=True)
    how = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(7, further=5)}
    for seed in range(2):
        results = [assisted(models, repeating(seed), **how) for models in ((prepared, own), (stock, drafting))]
        assert torch.equal(*results) and torch.equal(results[0], generate(stock, repeating(seed), new=NEW))
    assert counted(own)[1] > 0 and known(own).turned_away == {}
    sampling = hf_rocm.prepare(make("llama", vocab_size=66), force=True)
    assisted((prepared, sampling), repeating(), do_sample=True, **how)
    assert any("sampling with another tokenizer" in reason for reason in known(sampling).turned_away)
    sliding = hf_rocm.prepare(make("mistral", vocab_size=66), force=True)
    if not before("4.54"):
        assert torch.equal(assisted((prepared, sliding), repeating(), **how), generate(stock, repeating(), new=NEW))
        assert any("another tokenizer" in reason for reason in known(sliding).turned_away)
