"""The model is fingerprinted while the device computes the prompt, unless user code may run before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_rocm.generation import inputs, model_state
from hf_rocm.generation.state import known
from tests.generation.conftest import SAMPLED, Streamer, counted, generate
from tests.releases import in_the_newest

EARLY, LATE = ["fingerprint", "step"], ["step", "fingerprint"]


def unchanged(input_ids, scores):
    return scores


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
    [lambda: {"streamer": Streamer()}, lambda: {"logits_processor": [unchanged]}],
    ids=["streamer", "logits_processor"],
)
def test_it_is_fingerprinted_later_if_user_code_may_run_before_the_first_step(arguments, pair, order):
    prepared, _ = pair()
    generate(prepared, **arguments())
    assert order == LATE


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
