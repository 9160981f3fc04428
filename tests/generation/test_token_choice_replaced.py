"""While token choices are recorded, changes to functions, lists and settings take effect as in stock transformers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessorList, MaxLengthCriteria, TemperatureLogitsWarper
from transformers.generation import logits_process

from hf_rocm.generation import token_choice
from hf_rocm.generation.recorded_draw import draws_like_multinomial
from tests.generation.conftest import SAMPLED, Streamer, counted, generate, prompt, same

PLACES = {
    "multinomial": (torch, "multinomial", SAMPLED),
    "softmax": (torch.nn.functional, "softmax", SAMPLED),
    "argmax": (torch, "argmax", {}),
    "top-k": (logits_process.TopKLogitsWarper, "__call__", SAMPLED),
    "the list": (logits_process.LogitsProcessorList, "__call__", SAMPLED),
    "a processor's softmax": (torch, "softmax", {"do_sample": True, "top_k": 0, "min_p": 0.1}),
    "a processor's sort": (torch, "sort", {"do_sample": True, "top_k": 0, "top_p": 0.8}),
    "a tensor's method": (torch.Tensor, "log_softmax", {"do_sample": True, "renormalize_logits": True}),
    "the update": (GenerationMixin, "_update_model_kwargs_for_generation", {}),
}


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_replaced_functions_are_called(name, during, pair, chosen, monkeypatch):
    """Functions are called as often as in stock transformers, and with tensors, even if replaced during a call."""
    owner, attribute, settings = PLACES[name]
    prepared, stock = pair("llama", graphs=None)
    # Later calls compare few of their draws, and a comparison calls the functions too.
    for _ in range(3):
        generate(prepared, prompt(rows=1), seed=0, new=20, **settings)
    original, calls = getattr(owner, attribute), []

    def replacement(*args, **kwargs):
        calls.append(not any(isinstance(value, token_choice.StandIn) for value in args))
        return original(*args, **kwargs)

    actions = {7: lambda _: monkeypatch.setattr(owner, attribute, replacement)} if during else {}
    counts = []
    for model in (prepared, stock):
        with monkeypatch.context() as patch:
            if not during:
                patch.setattr(owner, attribute, replacement)
            calls.clear()
            tokens = generate(model, prompt(rows=1), seed=0, new=20, streamer=Streamer(actions), **settings)
            counts.append((len(calls), tokens))
            assert calls and all(calls)
        monkeypatch.setattr(owner, attribute, original)
    assert torch.equal(counts[0][1], counts[1][1])
    # Attention may call softmax too.
    if name != "softmax":
        assert counts[0][0] == counts[1][0]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_functions_replaced_before_the_first_call_are_called(sampling, pair, monkeypatch):
    """One replacement is another function of torch, and one accepts only the arguments that transformers passes."""
    draws_like_multinomial.cache_clear()
    token_choice._skipped.cache_clear()
    monkeypatch.setattr(torch, "argmax", torch.argmin)
    monkeypatch.setattr(torch, "multinomial", lambda weights, num_samples: weights.topk(2).indices[:, 1:])
    prepared, stock = pair("llama", graphs=None)
    for _ in range(2):
        assert same(prepared, stock, new=20, **sampling)
    assert counted(prepared)[1]
    token_choice._skipped.cache_clear()


def test_lists_that_change_during_a_call_take_effect(pair):
    """During a call, a streamer extends the call's lists of logits processors and stopping criteria."""

    def changes(lists):
        return {
            8: lambda _: lists["_get_logits_processor"].append(TemperatureLogitsWarper(0.1)),
            12: lambda _: lists["_get_stopping_criteria"].append(MaxLengthCriteria(22)),
        }

    prepared, stock = pair()
    for seed in range(2):
        results = []
        for model in (prepared, stock):
            lists = {}
            for name in ("_get_logits_processor", "_get_stopping_criteria"):
                inherited = getattr(type(model), name)

                def get(*args, name=name, inherited=inherited, model=model, lists=lists, **kwargs):
                    return lists.setdefault(name, inherited(model, *args, **kwargs))

                setattr(model, name, get)
            results.append(
                generate(model, prompt(rows=1), seed=seed, new=20, streamer=Streamer(changes(lists)), **SAMPLED)
            )
        assert torch.equal(*results) and results[0].shape[1] == 22


def test_a_setting_that_becomes_a_tensor_takes_effect(pair):
    prepared, stock = pair()
    for seed in range(2):
        tokens = []
        for model in (prepared, stock):
            processor = TemperatureLogitsWarper(2.0)
            processors = LogitsProcessorList([processor])

            change = partial(setattr, processor, "temperature", torch.linspace(0.5, 1, 61))
            streamer = Streamer({8: lambda _, change=change: change()})
            settings = {"logits_processor": processors, "streamer": streamer, "do_sample": True}
            tokens.append(generate(model, prompt(rows=1), seed=seed, new=20, **settings))
        assert torch.equal(*tokens)


def test_a_setting_that_changes_during_a_call_takes_effect(pair, chosen):
    prepared, stock = pair()

    class Changes(Streamer):
        def __init__(self, processor):
            super().__init__()
            self.processor = processor

        def put(self, value):
            super().put(value)
            self.processor.temperature = 0.3 if len(self.values) > 8 else 2.0

    for _ in range(2):
        tokens = []
        for model in (prepared, stock):
            processor = TemperatureLogitsWarper(2.0)
            settings = {"logits_processor": LogitsProcessorList([processor]), "streamer": Changes(processor)}
            tokens.append(generate(model, prompt(rows=1), seed=0, new=20, do_sample=True, **settings))
        assert torch.equal(*tokens)
    assert chosen["drawn"]
