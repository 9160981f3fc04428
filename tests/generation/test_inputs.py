"""Inputs of decode steps are prepared once by transformers and then updated in place, with the same results."""

from __future__ import annotations

import copy
import functools
import pickle
import time

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_rocm
from hf_rocm import ops
from hf_rocm.generation import inputs
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make, prompt

NEW = 12
# Number of steps after the prompt; their inputs are prepared in place.
PREPARED = NEW - 1


@pytest.fixture
def steps(monkeypatch):
    """A list that contains only the number of steps that were prepared in place."""
    counts = [0]
    original = inputs.Step.inputs

    def counted(*arguments):
        counts[0] += 1
        return original(*arguments)

    monkeypatch.setattr(inputs.Step, "inputs", counted)
    return counts


class Streamer:
    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.tokens.append("end")


class Penalty(LogitsProcessor):
    """A processor that depends on every token so far."""

    def __call__(self, input_ids, scores):
        return scores - 5 * torch.nn.functional.one_hot(input_ids, scores.shape[-1]).sum(1)


class Long(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12)


CALLS = {
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3},
    "a processor": {"logits_processor": LogitsProcessorList([Penalty()])},
    "a criterion": {"stopping_criteria": StoppingCriteriaList([Long()])},
    "several ends": {"eos_token_id": list(range(3, 8))},
    "several answers": {"do_sample": True, "num_return_sequences": 2, "seed": 3},
    "beams": {"num_beams": 2, "cache_implementation": "static"},
    "scores": {"return_dict_in_generate": True, "output_logits": True, "cache_implementation": "static"},
}


@pytest.mark.parametrize("name", CALLS)
def test_tokens_equal_stock(name, pair, steps):
    prepared, stock = pair("llama", graphs=None)
    actual, expected = (generate(model, prompt(padded=2), new=NEW, **CALLS[name]) for model in (prepared, stock))
    # The call may end early.
    assert steps[0] > 1
    if name == "scores":
        inputs.switch_off(prepared)
        same = generate(prepared, prompt(padded=2), new=NEW, **CALLS[name])
        assert torch.equal(torch.stack(actual.logits), torch.stack(same.logits))
        actual, expected = actual.sequences, expected.sequences
    assert torch.equal(actual, expected)


def test_a_streamer_receives_the_same_tokens_as_in_stock(pair, steps):
    prepared, stock = pair("llama", graphs=None)
    streams = []
    for model in (prepared, stock):
        streams.append(Streamer())
        generate(model, prompt(rows=1), new=NEW, streamer=streams[-1])
    assert streams[0].tokens == streams[1].tokens
    assert steps[0] == PREPARED


def test_calls_of_alternating_shapes_equal_stock(pair, steps):
    """Change the batch size, the length and the padding between the calls of one model."""
    prepared, stock = pair("gemma2", graphs=None)
    for rows, length, padded in ((2, 7, 0), (1, 9, 0), (2, 7, 3), (3, 5, 1), (2, 7, 0), (2, 7, 2)):
        call = prompt(rows=rows, length=length, padded=padded, seed=length + padded)
        assert torch.equal(generate(prepared, call, new=NEW), generate(stock, call, new=NEW)), (rows, length, padded)
    assert steps[0] == 6 * PREPARED


def mask_with_a_hole():
    call = prompt()
    call["attention_mask"][0, 3] = 0
    return call


def right_padding():
    call = prompt()
    call["attention_mask"][0, -2:] = 0
    return call


def positions():
    call = prompt()
    return {**call, "position_ids": torch.arange(1, 8)[None].repeat(2, 1)}


def embedded():
    ids = prompt()["input_ids"]
    return {"inputs_embeds": torch.nn.functional.one_hot(ids, 32 if ids.max() < 32 else 61).float()[..., :32]}


@pytest.mark.parametrize("call", [mask_with_a_hole, right_padding, positions, embedded], ids=lambda call: call.__name__)
def test_calls_with_other_masks_positions_or_embeddings_equal_stock(call, pair, steps):
    served, stock = pair("llama", graphs=None)
    assert torch.equal(generate(served, call(), new=NEW), generate(stock, call(), new=NEW))
    if call in (mask_with_a_hole, right_padding):
        assert steps[0] == 0
        assert inputs.noted(served) == "the attention mask is not that of a sequence with left padding"
    # The next call is prepared in place.
    assert torch.equal(generate(served, new=NEW), generate(stock, new=NEW))
    assert inputs.noted(served) is None
    assert steps[0] >= PREPARED


def test_a_class_with_its_own_preparation_keeps_it(steps):
    class Own(transformers.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model = Own(make("llama").config).eval()
    assert inputs.switch_on(model) == "Own has its own prepare_inputs_for_generation"
    generate(model, new=NEW, cache_implementation="static")
    assert steps[0] == 0


def test_a_subclass_of_a_prepared_models_class_stays_stock(pair, steps):
    pair("llama")

    class Sub(transformers.LlamaForCausalLM):
        pass

    generate(Sub(make("llama").config).eval(), new=NEW, cache_implementation="static")
    assert steps[0] == 0


def test_copies_and_pickles_prepare_inputs_and_a_restored_model_does_not(pair, steps):
    prepared, stock = pair("llama", graphs=None)
    expected = generate(stock, new=NEW)
    for model in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), prepared):
        steps[0] = 0
        assert torch.equal(generate(model, new=NEW), expected)
        assert steps[0] == PREPARED
    hf_rocm.restore(prepared)
    steps[0] = 0
    assert torch.equal(generate(prepared, new=NEW, cache_implementation="static"), expected)
    assert steps[0] == 0
    assert not [name for name in prepared.__dict__ if name.startswith("_hf_rocm")]


def test_a_step_reads_the_same_tensors(pair):
    """Two calls with one cache read the same tensors. A call with padding reads different ones."""
    calls = []
    prepared, _ = pair("llama", graphs=False)
    prepared.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    cache = transformers.StaticCache(config=prepared.config, max_batch_size=2, max_cache_len=32, device="cpu")
    places = []
    for padded in (0, 0, 3):
        cache.reset()
        generate(prepared, prompt(padded=padded), new=4, past_key_values=cache)
        steps = [inputs for inputs in calls if inputs["input_ids"].shape[1] == 1]
        names = {name for name in steps[0] if isinstance(steps[0][name], torch.Tensor)}
        assert {"input_ids", "attention_mask"} <= names
        places.append({name: {step[name].data_ptr() for step in steps} for name in names})
        calls.clear()
    assert all(len(addresses) == 1 for place in places for addresses in place.values())
    assert places[0] == places[1]
    assert all(places[0][name] != places[2][name] for name in places[0])


class Operators(TorchDispatchMode):
    """Count the operators that PyTorch dispatches. `ops.begin_step` counts as one, since it is one kernel on a GPU."""

    count = 0
    inside = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not self.inside
        return operator(*args, **(kwargs or {}))

    def begin_step(self, call, begin_step=ops.begin_step):
        self.count += 1
        self.inside = True
        begin_step(call)
        self.inside = False


def costs(model, monkeypatch):
    """Returns (operators, seconds of thread time) for preparing all steps of one call except the first few."""
    spent = []

    def measured(method):
        def call(*args, **kwargs):
            with Operators() as operators:
                monkeypatch.setattr(ops, "begin_step", operators.begin_step)
                began = time.thread_time()
                result = method(*args, **kwargs)
                spent.append((operators.count, time.thread_time() - began))
            return result

        return functools.wraps(method)(call)

    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        monkeypatch.setattr(type(model), name, measured(getattr(type(model), name)))
    generate(model, prompt(padded=2), new=40, cache_implementation="static")
    monkeypatch.undo()
    return [sum(times) for times in zip(*spent[8:], strict=True)]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_host_runs_fewer_operators(kind, pair, monkeypatch):
    prepared, stock = pair(kind, graphs=False)
    # use the shortest of three runs, because garbage collection may run during one of them
    runs = [[costs(model, monkeypatch) for model in (prepared, stock)] for _ in range(3)]
    for (operators, _), (stock_operators, _) in runs:
        assert operators < stock_operators / 2
    seconds, stock_seconds = (min(run[index][1] for run in runs) for index in (0, 1))
    assert seconds < stock_seconds


class Edits(StoppingCriteria):
    """Changes the second-to-last token in place, after its keys and values were computed."""

    def __init__(self):
        self.tokens = []

    def __call__(self, input_ids, scores, **kwargs):
        if len(self.tokens) in (6, 7, 11):
            input_ids[:, -2] = 9
        self.tokens.append(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_tokens_changed_in_place_by_user_code_are_not_a_fault(kind, pair):
    """A comparison does not recompute a step whose tokens have changed since the step ran."""
    prepared, stock = pair(kind)
    for _ in range(2):
        results = []
        for model in (prepared, stock):
            edits = Edits()
            results.append([generate(model, new=24, stopping_criteria=StoppingCriteriaList([edits])), *edits.tokens])
        assert all(map(torch.equal, *results))
    assert known(prepared).disabled is None and counted(prepared)[1] > 20
