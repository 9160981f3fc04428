"""PEFT adapters: models with LoRA are recorded; prompt learning, which changes a step's inputs, runs uncaptured."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

import hf_rocm
from hf_rocm import patches
from hf_rocm.errors import GraphError
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make, prompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CONFIGS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "LoRA": lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
}


def adapted(model, name):
    torch.manual_seed(3)
    return peft.get_peft_model(model, CONFIGS[name]()).eval()


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_generated_tokens_equal_stock(name, padded, recorded_on_cpu):
    stock = make("llama")
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    inputs = prompt(padded=padded)
    expected = generate(adapted(stock, name), inputs)
    model = adapted(prepared, name)
    for _ in range(2):
        assert torch.equal(generate(model, inputs), expected)
    assert known(prepared).disabled is None
    if name == "LoRA":
        assert counted(prepared)[1] > 0
    else:
        assert counted(prepared) == (0, 0)


@pytest.mark.parametrize("name", ["prompt tuning", "p-tuning"])
def test_the_reason_is_kept_and_the_unwrapped_model_is_recorded(name, recorded_on_cpu):
    prepared = hf_rocm.prepare(make("llama"), force=True)
    stock = copy.deepcopy(prepared)
    hf_rocm.restore(stock)
    generate(adapted(prepared, name))
    assert any("PEFT's prompt learning" in reason for reason in known(prepared).turned_away)
    assert torch.equal(generate(prepared), generate(stock)) and counted(prepared)[1] > 0


def adapted_without_task(model):
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("wrap", [adapted_without_task, lambda model: adapted(model, "LoRA")])
@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_the_wrapped_model_is_recorded_and_explained(wrap, first, recorded_on_cpu):
    stock = make("llama")
    inputs = prompt()
    expected = generate(wrap(copy.deepcopy(stock)), inputs)
    steps = {"wrap": wrap, "prepare": lambda model: hf_rocm.prepare(model, force=True)}
    model = steps.pop(first)(stock)
    model = next(iter(steps.values()))(model)
    for _ in range(2):
        assert torch.equal(generate(model, inputs), expected)
    assert counted(stock)[1] > 0
    lines = hf_rocm.explain(model).decoding
    assert lines[0] == "steps are recorded and replayed" and "calls to generate: 2" in lines[1]
    hf_rocm.restore(model)
    assert known(stock) is None and not patches.of(stock)
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_hf_rocm_")]
    assert hf_rocm.explain(model).decoding == ()
    assert torch.equal(generate(model, inputs), expected)


def test_verify_compares_the_recorded_steps_of_the_wrapped_model(recorded_on_cpu):
    verification = hf_rocm.verify(adapted(make("llama"), "LoRA"), force=True, quick=True)
    assert verification.passed, str(verification)
    check = verification.check("graph replay")
    assert check.status == "passed" and check.numbers["replayed"] > 20


def test_preparing_the_wrapped_model_again_keeps_its_setting(recorded_on_cpu):
    model = adapted_without_task(hf_rocm.prepare(make("llama"), force=True, graphs=False))
    hf_rocm.prepare(model, force=True)
    assert hf_rocm.explain(model).decoding[0] == "steps run uncaptured: graphs are switched off"


def test_required_graphs_raise_with_prompt_learning(recorded_on_cpu):
    prepared = hf_rocm.prepare(make("llama"), force=True, graphs=True)
    with pytest.raises(GraphError, match="prompt learning"):
        generate(adapted(prepared, "prompt tuning"))


def test_a_users_prepare_inputs_gets_the_same_cache_as_in_stock(recorded_on_cpu):
    stock = make("llama")
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    caches = {}

    def set_prepare(model, name):
        inherited = model.prepare_inputs_for_generation

        def prepare(*args, **kwargs):
            inputs = inherited(*args, **kwargs)
            caches.setdefault(name, set()).add(type(inputs.get("past_key_values")).__name__)
            return inputs

        model.prepare_inputs_for_generation = prepare

    set_prepare(stock, "stock")
    set_prepare(prepared, "prepared")
    assert torch.equal(generate(prepared), generate(stock))
    assert caches["prepared"] == caches["stock"] and counted(prepared) == (0, 0)
