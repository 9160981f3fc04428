"""Rounds of an assistant without a call to `generate` draft the same tokens as stock transformers."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor
from transformers.generation import candidate_generator
from transformers.generation.stopping_criteria import ConfidenceCriteria

import hf_rocm
from hf_rocm.generation import drafting
from hf_rocm.generation.assistant import Rounds
from hf_rocm.generation.host_tokens import HostTokens
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.generation.schedule import Schedule
from hf_rocm.generation.state import known
from tests.generation.conftest import Streamer, assistant_of, generate
from tests.generation.test_speculation import before, repeating

NEW = 40
CALLS = 6


class Drafts:
    """The drafts of every round. skipped: those of the rounds that did not call `generate`."""

    def __init__(self, monkeypatch):
        self.all = []
        self.skipped = []
        draft, decode = Rounds.draft, Rounds.decode

        def drafts(rounds, generator, arguments):
            result = draft(rounds, generator, arguments)
            if result is not None:
                self.skipped.append(result[0, arguments[generator.input_ids_key].shape[1] :].tolist())
                self.all.append(self.skipped[-1])
            return result

        def decodes(rounds, *args):
            result = decode(rounds, *args)
            self.all.append(drafts_in(result))
            return result

        monkeypatch.setattr(Rounds, "draft", drafts)
        monkeypatch.setattr(Rounds, "decode", decodes)


def drafts_in(result):
    """The drafts in the result of a call to the assistant's `generate`."""
    return result.sequences[0, -len(result.scores) :].tolist()


@pytest.fixture
def drafts(monkeypatch):
    return Drafts(monkeypatch)


@pytest.fixture
def trio(pair):
    """A function that returns ((a prepared model, a prepared assistant), (the stock model, the stock assistant))."""

    def build(*, schedule="constant", noise=0.02, threshold=0.0, number=4):
        prepared, stock = pair(graphs=True)
        assistant = assistant_of(stock, schedule, noise)
        config = assistant.generation_config
        config.assistant_confidence_threshold, config.num_assistant_tokens = threshold, number
        for model in (prepared, stock):
            model.generation_config.eos_token_id = None
        return (prepared, hf_rocm.prepare(copy.deepcopy(assistant), force=True, graphs=True)), (stock, assistant)

    return build


def assisted(models, inputs, *, new=NEW, **arguments):
    return generate(models[0], inputs, new=new, assistant_model=models[1], **arguments)


def drafted_by_stock(models, calls, **arguments):
    """Return the tokens of these calls, and the drafts of every round."""
    expected, inherited = [], models[1].generate

    def drafting_as_stock(*args, **kwargs):
        result = inherited(*args, **kwargs)
        expected.append(drafts_in(result))
        return result

    models[1].generate = drafting_as_stock
    return [assisted(models, inputs, **arguments) for inputs in calls], expected


def compare(prepared_pair, stock_pair, drafts, calls=None, **arguments):
    """Assert that tokens and drafts equal stock's, and return how many rounds did not call `generate`."""
    calls = calls or [repeating(seed % 3, padded=seed % 2) for seed in range(CALLS)]
    tokens = [assisted(prepared_pair, inputs, **arguments) for inputs in calls]
    expected, expected_drafts = drafted_by_stock(stock_pair, calls, **arguments)
    assert all(map(torch.equal, tokens, expected)) and drafts.all == expected_drafts
    assert known(prepared_pair[1]).turned_away == {}
    return len(drafts.skipped)


@pytest.mark.parametrize("schedule, noise", [("constant", 0.0), ("heuristic", 0.02), ("heuristic_transient", 0.2)])
def test_drafts_are_those_of_stock(schedule, noise, trio, drafts):
    assert compare(*trio(schedule=schedule, noise=noise), drafts) > 0


def test_transformers_masks_padding_tokens_in_calls_without_a_mask(trio, drafts):
    """From 5.0 on, transformers drops a mask without padding, and derives the assistant's mask from all tokens."""
    prepared_pair, stock_pair = trio()
    token = int(assisted(stock_pair, repeating())[0, -9])
    for model in (prepared_pair[0], stock_pair[0]):
        model.generation_config.pad_token_id = token
    # Calls whose tokens include the padding token follow calls whose rounds skip `generate`.
    assert compare(prepared_pair, stock_pair, drafts, [repeating(seed) for seed in (1, 2, 1, 2, 1, 2, 0, 0)]) > 0


@pytest.mark.parametrize("threshold", [0.05, 0.4])
def test_a_draft_below_the_threshold_is_the_last_one(threshold, trio, drafts):
    assert compare(*trio(threshold=threshold, number=6), drafts) > CALLS
    assert min(map(len, drafts.skipped)) < 6


def test_an_eos_token_is_the_last_draft(trio, drafts):
    prepared_pair, stock_pair = trio(noise=0.05)
    tokens = assisted(stock_pair, repeating())[0].tolist()
    # the token whose first occurrence is the latest
    end = max(set(tokens), key=tokens.index)
    for model in (prepared_pair[0], stock_pair[0]):
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = [end, 62], end
    assert compare(prepared_pair, stock_pair, drafts, [repeating()] * CALLS) > 0
    assert len(assisted(stock_pair, repeating())[0]) < len(tokens)


def test_the_probabilities_of_all_drafts_determine_the_next_threshold(trio, drafts, monkeypatch):
    """With scikit-learn, transformers adapts the threshold to the probabilities of accepted and rejected drafts."""
    received = []

    def roc_curve(matches, probabilities):
        received.append((list(matches), list(probabilities)))
        return torch.zeros(2).numpy(), torch.ones(2).numpy(), [0.06 + 0.01 * (len(received) % 3)] * 2

    metrics = types.ModuleType("sklearn.metrics")
    metrics.roc_curve = roc_curve
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.metrics", metrics)
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: True)
    monkeypatch.setattr(candidate_generator, "roc_curve", roc_curve, raising=False)
    prepared_pair, stock_pair = trio(threshold=0.05, noise=0.3)
    calls = [repeating(seed) for seed in range(CALLS)]
    tokens = [assisted(prepared_pair, inputs) for inputs in calls]
    ours = received[:]
    received.clear()
    expected, expected_drafts = drafted_by_stock(stock_pair, calls)
    assert all(map(torch.equal, tokens, expected)) and drafts.all == expected_drafts and len(drafts.skipped) > CALLS
    assert len(ours) > CALLS and [matches for matches, _ in ours] == [matches for matches, _ in received]
    for (_, probabilities), (_, stock_probabilities) in zip(ours, received, strict=True):
        assert probabilities == pytest.approx(stock_probabilities, rel=1e-5)


def refuse_nothing(monkeypatch, models):
    return {}


def set_generate(monkeypatch, models):
    inherited = models[1].generate
    monkeypatch.setattr(models[1], "generate", lambda *args, **kwargs: inherited(*args, **kwargs), raising=False)
    return {}


def replace_a_criterion(monkeypatch, models):
    inherited = ConfidenceCriteria.__call__
    monkeypatch.setattr(ConfidenceCriteria, "__call__", lambda *args, **kwargs: inherited(*args, **kwargs))
    return {}


def stream(monkeypatch, models):
    return {"streamer": Streamer()}


def require_tokens(monkeypatch, models):
    for model in models:
        model.generation_config.eos_token_id = 5
    return {"min_new_tokens": NEW}


def penalise(monkeypatch, models):
    return {"repetition_penalty": 1.1}


def mix_logits(monkeypatch, models):
    """In greedy decoding, releases from 5.19 on mix the probabilities of both models."""
    return {"assistant_ensemble_weight": 0.5}


def require_more_tokens(monkeypatch, models):
    """transformers passes the same list of processors to the assistant."""
    processor = MinNewTokensLengthLogitsProcessor(22, NEW, 5, device="cpu")
    return {"logits_processor": LogitsProcessorList([processor])}


def return_scores(monkeypatch, models):
    return {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize(
    "changed, expected",
    [
        (refuse_nothing, True),
        (set_generate, False),
        (replace_a_criterion, False),
        (stream, False),
        pytest.param(
            require_tokens,
            False,
            marks=pytest.mark.skipif(not before("4.54") and before("5.19"), reason="not run: stock refuses such calls"),
        ),
        (penalise, False),
        (require_more_tokens, False),
        (return_scores, False),
        pytest.param(mix_logits, False, marks=pytest.mark.skipif(before("5.19"), reason="not run: needs 5.19")),
    ],
)
def test_what_generate_would_call_is_called(changed, expected, trio, drafts, monkeypatch):
    prepared_pair, stock_pair = trio(threshold=0.01)
    arguments = changed(monkeypatch, prepared_pair)
    if "min_new_tokens" in arguments:
        stock_pair[0].generation_config.eos_token_id = 5
    for seed in range(CALLS):
        tokens = assisted(prepared_pair, repeating(seed % 3), **arguments)
    assert bool(drafts.skipped) is expected
    if changed is not stream:
        stock = assisted(stock_pair, repeating(seed % 3), **arguments)
        assert torch.equal(
            *(result if isinstance(result, torch.Tensor) else result.sequences for result in (tokens, stock))
        )


def test_no_round_begins_beyond_the_positions_of_the_assistant(trio, drafts, monkeypatch):
    prepared_pair, stock_pair = trio()
    limit, launched, launch = 22 + NEW - 12, [], drafting.Drafts._launch
    for model in (prepared_pair[1], stock_pair[1]):
        model.config.max_position_embeddings = limit

    def launches(self, begun, settings):
        assert settings.limit == limit
        launched.append(begun.place[1] + begun.drafts)
        return launch(self, begun, settings)

    monkeypatch.setattr(drafting.Drafts, "_launch", launches)
    assert compare(prepared_pair, stock_pair, drafts) > 0
    assert max(launched) < limit


def test_models_on_different_devices_call_generate(trio, monkeypatch):
    model, assistant = trio()[0]
    devices = {id(model): torch.device("cpu"), id(assistant): torch.device("meta")}
    for different in (True, False):
        rounds = Rounds(assistant, model if different else assistant, limit=64, translated=False, observed=False)
        with monkeypatch.context() as patched:
            patched.setattr(type(model), "device", property(lambda self: devices[id(self)]))
            tokens = HostTokens()
            assert rounds.follow(tokens, Lookahead(tokens)) is not different


def test_an_assistant_in_fp64_calls_generate(trio, drafts):
    """Its recorded steps don't determine the tokens with the largest logits."""
    prepared_pair, stock_pair = trio()
    for model in (prepared_pair[1], stock_pair[1]):
        model.double()
    assert compare(prepared_pair, stock_pair, drafts) == 0 and known(prepared_pair[1]).replayed > CALLS


def test_sampling_calls_generate(trio, drafts):
    prepared_pair, _ = trio()
    for seed in range(CALLS):
        assisted(prepared_pair, repeating(seed % 3), seed=seed, do_sample=True)
    assert drafts.skipped == [] and drafts.all


def test_the_generator_is_stock_again_after_a_call(trio, drafts):
    names = ("_generate_candidates", "update_candidate_strategy")
    methods = [vars(candidate_generator.AssistedCandidateGenerator)[name] for name in names]
    assert compare(*trio(), drafts) > 0
    assert [vars(candidate_generator.AssistedCandidateGenerator)[name] for name in names] == methods


def test_a_feature_that_is_not_supported_is_not_used(trio, drafts, monkeypatch):
    monkeypatch.setattr(
        drafting.features, "refuses", lambda feature: "unknown" if feature == drafting.FEATURE else None
    )
    assert compare(*trio(), drafts) == 0


def test_a_schedule_looks_several_replays_ahead():
    schedule = Schedule()
    for call in range(4):
        schedule.enter(call)
        schedule.agreed()
    schedule.enter(4)
    # The interval is two replays now.
    assert [schedule.due_in(4, replays) for replays in (1, 2, 3)] == [False, True, True]
    schedule.count()
    assert schedule.due_in(4)
