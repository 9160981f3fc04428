"""A prepared model equals stock while functions are replaced, wrapped, registered and restored at random.

The stock model runs in the same process and calls the same replacements.
"""

from __future__ import annotations

import copy
import functools
import sys
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn
from transformers import masking_utils, modeling_rope_utils, modeling_utils

import hf_rocm
from hf_rocm import ops
from tests.generation.conftest import generate, make, prompt
from tests.releases import at_the_ends
from tests.replacing import masked, replaced, scaled

KINDS = [kind for kind in ("llama", "cohere", "gpt_oss", "mixtral") if hasattr(transformers.models, kind)]


def wrapped(function):
    """A wrapper that changes nothing."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def pieces_of(model):
    """name → (owner, attribute, a function that returns a replacement, usually one with different results)."""
    home = sys.modules[type(model).__module__]
    interface, masks = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    name = model.config._attn_implementation
    pieces = {
        "sdpa": (F, "scaled_dot_product_attention", scaled),
        "linear": (nn.Linear, "forward", scaled),
        "masks": (masks, name, masked if name == "sdpa" else wrapped),
        "rope init": (modeling_rope_utils.ROPE_INIT_FUNCTIONS, "linear", scaled),
        "local": (interface, "sdpa", scaled),
    }
    for function in ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"):
        if hasattr(home, function):
            pieces[function] = (home, function, scaled)
    for module in model.modules():
        cls = type(module)
        if cls.__module__ == home.__name__ and not cls.__name__.endswith(("Model", "ForCausalLM", "DecoderLayer")):
            pieces[cls.__name__] = (cls, "forward", scaled)
        if cls.__module__ == "transformers.activations":
            pieces["activation"] = (cls, "forward", scaled)
        if hasattr(cls, "_apply_gate"):
            pieces["gate"] = (cls, "_apply_gate", scaled)
    return pieces


class Replacing(RuleBasedStateMachine):
    """A prepared and a stock model of the same kind."""

    @initialize(kind=st.sampled_from(KINDS))
    def build(self, kind):
        self.stock = make(kind)
        # Bind the overlay before anything is replaced. test_replaced covers replacements before the binding, which
        # need a second `prepare`.
        hf_rocm.prepare(make(kind), force=True)
        self.pieces = pieces_of(self.stock)
        self._prepared = None
        self.places = {}

    @rule(data=st.data(), change=st.sampled_from(("replace", "wrap")))
    def replace(self, data, change):
        name = data.draw(st.sampled_from(sorted(self.pieces)))
        owner, attribute, replacement = self.pieces[name]
        change = replacement if change == "replace" else wrapped
        self.places.setdefault(name, ExitStack()).enter_context(replaced(owner, attribute, change))

    @rule(data=st.data(), call=st.sampled_from(("generated", "run")), again=st.booleans())
    def replace_between_calls(self, data, call, again):
        """Replace a function between two calls, and restore it after the second one."""
        owner, attribute, replacement = self.pieces[data.draw(st.sampled_from(sorted(self.pieces)))]
        call = getattr(self, call)
        call()
        with replaced(owner, attribute, replacement):
            call()
        if again:
            call()

    @rule(key=st.sampled_from(("sdpa", "eager")))
    def register(self, key):
        """Call `AttentionInterface.register`, which affects all modeling files."""
        table = modeling_utils.AttentionInterface._global_mapping
        home = sys.modules[type(self.stock).__module__]
        before, function = table.get(key), table.get(key, home.eager_attention_forward)
        modeling_utils.AttentionInterface.register(key, scaled(function))
        restore = functools.partial(table.__setitem__, key, before) if before else functools.partial(table.pop, key)
        self.places.setdefault(f"registered {key}", ExitStack()).callback(restore)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def restore(self, data):
        self.places.pop(data.draw(st.sampled_from(sorted(self.places)))).close()

    @precondition(lambda self: self.places)
    @rule()
    def restore_all(self):
        while self.places:
            self.places.popitem()[1].close()

    @rule(padded=st.sampled_from((0, 2)))
    def forward(self, padded):
        operations = self.run(padded)
        reasons = [part for part in hf_rocm.explain(self._prepared).parts if part.stock_because is not None]
        if not self.places:
            assert not reasons
            assert {"linear", "attention"} <= operations
        elif "apply_rotary_pos_emb" in self.places:
            assert any(part.cls.endswith("Attention") for part in reasons)
            assert "rope" not in operations

    @rule(beams=st.sampled_from((1, 1, 2)), times=st.sampled_from((1, 2)))
    def generate(self, beams, times):
        for _ in range(times):
            self.generated(beams)

    @rule()
    def train(self):
        """Compare loss and gradients of a training step, which changes the weights in place and restores them."""
        results = []
        for model in (self.stock, self.prepared()):
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            inputs = prompt()
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            with torch.no_grad():
                # the gradient of an expert without tokens is None or zero
                gradients = [
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    for parameter in model.parameters()
                ]
                results.append([loss.detach(), *gradients])
                for parameter, gradient, weight in zip(model.parameters(), gradients, weights, strict=True):
                    parameter -= 1e-3 * gradient
                    parameter.copy_(weight)
                    parameter.grad = None
        for expected, actual in zip(*results, strict=True):
            self.close(actual, expected)

    def run(self, padded=0):
        """Compare the outputs of a forward with stock's. Returns the operations that ran."""
        with torch.no_grad():
            expected = self.stock(**prompt(padded=padded)).logits
            with ops.recording() as routes:
                actual = self.prepared()(**prompt(padded=padded)).logits
        self.close(actual, expected)
        return {route.operation for route in routes}

    def generated(self, beams=1):
        """Compare the tokens of a call to `generate`, whose steps may be replayed, with stock's."""
        expected = generate(self.stock, new=8, num_beams=beams)
        assert torch.equal(generate(self.prepared(), new=8, num_beams=beams), expected)

    def prepared(self):
        """The prepared model. It is prepared at its first use, possibly after replacements."""
        if self._prepared is None:
            self._prepared = hf_rocm.prepare(copy.deepcopy(self.stock), force=True)
        return self._prepared

    def close(self, actual, expected):
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(actual / scale, expected / scale, rtol=1e-4, atol=1e-4)

    def teardown(self):
        for stack in getattr(self, "places", {}).values():
            stack.close()


def run(examples):
    run_state_machine_as_test(Replacing, settings=settings(max_examples=examples, stateful_step_count=14))


def test_a_prepared_model_equals_stock(recorded_on_cpu):
    run(8)


@pytest.mark.slow
@at_the_ends
def test_a_prepared_model_equals_stock_in_many_runs(recorded_on_cpu):
    run(15)
