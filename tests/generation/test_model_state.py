"""The model is fingerprinted while the device computes the prompt, unless user code may run before the first step."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from hf_rocm.generation import inputs, model_state
from hf_rocm.generation.state import known
from tests.generation.conftest import SAMPLED, Streamer, counted, generate
from tests.releases import in_the_newest

EARLY, LATE = ["fingerprint", "step"], ["step", "fingerprint"]
# After this number of calls, most replays are not compared.
NORMAL = 12


def never(input_ids, scores, **_):
    """A stopping criterion that ends no row."""
    return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture
def order(monkeypatch):
    """The order in which the model is fingerprinted and the inputs of a call's first step are prepared."""
    events, fingerprint, step = [], model_state.fingerprint, inputs.Step

    def fingerprints(*arguments):
        events.append("fingerprint")
        return fingerprint(*arguments)

    class Step(step):
        def __init__(self, *arguments):
            events.append("step")
            super().__init__(*arguments)

    monkeypatch.setattr(model_state, "fingerprint", fingerprints)
    monkeypatch.setattr(inputs, "Step", Step)
    return events


@pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_model_is_fingerprinted_before_the_first_step_is_prepared(arguments, pair, order):
    prepared, stock = pair()
    for seed in range(3):
        order.clear()
        tokens = generate(prepared, seed=seed, **arguments)
        assert order == EARLY
        assert torch.equal(tokens, generate(stock, seed=seed, **arguments))
    recorded, replayed = counted(prepared)
    assert recorded == 1 and replayed > 20


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: {"streamer": Streamer()},
        lambda: {"logits_processor": [lambda input_ids, scores: scores]},
        lambda: {"stopping_criteria": [never]},
    ],
    ids=["streamer", "logits_processor", "stopping_criteria"],
)
def test_it_is_fingerprinted_later_if_user_code_may_run_before_the_first_step(arguments, pair, order):
    prepared, _ = pair()
    generate(prepared, **arguments())
    assert order == LATE


def wrapped(method, act):
    """A method with the names of `method`, which first calls `act` with the model."""

    @functools.wraps(method)
    def wrapper(self, *arguments, **keywords):
        act(self)
        return method(self, *arguments, **keywords)

    return wrapper


@pytest.mark.parametrize("on_class", [False, True], ids=["model", "class"])
@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_has_unfinished_sequences"])
def test_it_is_fingerprinted_later_if_a_method_of_the_loop_was_wrapped(name, on_class, pair, order, monkeypatch):
    prepared, _ = pair()
    generate(prepared)
    order.clear()
    cls, calls = type(prepared), []
    wrapper = wrapped(getattr(cls, name), calls.append)
    if on_class:
        monkeypatch.setattr(cls, name, wrapper)
    else:
        monkeypatch.setitem(prepared.__dict__, name, wrapper.__get__(prepared))
    generate(prepared)
    assert calls and order == LATE


def test_a_weight_that_a_wrapped_method_replaces_before_the_first_step_is_used(pair, monkeypatch):
    prepared, stock = pair()
    calls = []

    def negate(model):
        calls.append(model)
        # the first step of the last call
        if len(calls) == 12 * NORMAL + 2:
            model.model.norm.weight = nn.Parameter(-model.model.norm.weight.detach())

    results = []
    for model in (prepared, stock):
        calls.clear()
        method = type(model).prepare_inputs_for_generation
        monkeypatch.setitem(model.__dict__, "prepare_inputs_for_generation", wrapped(method, negate).__get__(model))
        results.append([generate(model) for _ in range(NORMAL + 1)])
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))
    assert not torch.equal(*results[1][-2:]) and counted(prepared)[1] > 100


def test_a_criterion_that_the_model_adds_is_user_code(pair, order, monkeypatch):
    prepared, _ = pair()
    method = type(prepared)._get_stopping_criteria

    def adding(*arguments, **keywords):
        criteria = method(prepared, *arguments, **keywords)
        criteria.append(never)
        return criteria

    monkeypatch.setitem(prepared.__dict__, "_get_stopping_criteria", adding)
    generate(prepared)
    assert order == LATE


def test_a_call_for_one_token_does_not_fingerprint_the_model(pair, order):
    prepared, stock = pair()
    assert torch.equal(generate(prepared, new=1), generate(stock, new=1)) and not order


def test_a_weight_that_a_streamer_replaces_before_the_first_step_is_used(pair):
    prepared, stock = pair()
    tokens = generate(prepared)

    def generated(model):
        def replace(_):
            norm = model.model.norm
            norm.weight = nn.Parameter(-norm.weight.detach())

        # the prompt, and the first token
        return generate(model, streamer=Streamer({2: replace}))

    for _ in range(3):
        changed = generated(prepared)
        assert torch.equal(changed, generated(stock)) and not torch.equal(changed, tokens)
        generated(prepared), generated(stock)
    assert counted(prepared)[0] > 0


# In transformers 5.0, `generate` sets the implementation before every step.
@in_the_newest
def test_it_is_fingerprinted_again_if_the_experts_implementation_has_changed(pair, order, monkeypatch):
    prepared, stock = pair("mixtral")
    assert torch.equal(generate(prepared), generate(stock)) and order == EARLY
    order.clear()
    step = inputs.Step

    class Step(step):
        def __init__(self, *arguments):
            known(prepared).switches += 1
            super().__init__(*arguments)

    monkeypatch.setattr(inputs, "Step", Step)
    assert torch.equal(generate(prepared), generate(stock)) and order == [*EARLY, "fingerprint"]


def test_nothing_is_kept_after_a_call(pair):
    prepared, _ = pair()
    generate(prepared)
    (idle,) = known(prepared).pool._idle
    assert idle.cache.runner is None and idle.cache.choice is None
