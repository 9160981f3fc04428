"""Small models whose decode steps are recorded on a CPU, and the stock models for comparison."""

from __future__ import annotations

import copy
import threading
from collections import Counter

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm.device import Device, simulated
from hf_rocm.generation import (
    cache_layer,
    continuous_batching,
    deferred_stop,
    lookahead,
    loop_rows,
    pool,
    recorder,
    suspects,
    token_choice,
)
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.generation.recorded_draw import RecordedDraw
from hf_rocm.generation.state import known
from tests.generation.emulator import EmulatedRecorder

SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
KINDS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 10}),
    # eager attention, which transformers selects from 5.21 on, because SDPA has no softcap
    "gemma2": ("Gemma2", {"sliding_window": 10, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3", {"sliding_window": 10, "query_pre_attn_scalar": 8, "num_hidden_layers": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# models that only a few tests use
FURTHER = {
    "cohere": ("Cohere", {}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 10}),
    "phi3": ("Phi3", {}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),
}


def make(kind, **changes):
    """A model with weights so large that the tokens of a sequence differ."""
    name, arguments = {**KINDS, **FURTHER}[kind]
    config_name = "Gemma3TextConfig" if kind == "gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**{**COMMON, **arguments, **changes})
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.4)
    model.tie_weights()
    return model.eval()


def assistant_of(stock, schedule="heuristic", noise=0.02):
    """A copy of a model with noise in its weights. Most of its drafts equal the model's tokens."""
    assistant = copy.deepcopy(stock)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(
                noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(parameter)
            )
    if schedule is not None:
        config = assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = 4, schedule
        config.assistant_confidence_threshold = 0.0
    return assistant


@pytest.fixture
def recorded_on_cpu(monkeypatch):
    """Record steps on CPUs too. Windows move and buffers grow after a few tokens."""
    monkeypatch.setitem(recorder.factories, "cpu", EmulatedRecorder)
    monkeypatch.setattr(cache_layer, "SLACK", 5)
    monkeypatch.setattr(cache_layer, "LEAST", 16)
    monkeypatch.setattr(pool, "_AHEAD", 32)


@pytest.fixture
def suspect_gpu(recorded_on_cpu, monkeypatch):
    """Describe the CPU as an MI300X with ROCm 7.2.1."""
    monkeypatch.setattr(torch.version, "rocm", "7.2.1", raising=False)
    suspects._warn.cache_clear()
    continuous_batching._warn.cache_clear()
    with simulated("cpu", Device("cpu", rocm=True, arch="gfx942")):
        yield


@pytest.fixture
def pair(recorded_on_cpu):
    """A function that returns the (prepared, stock) models of a kind.

    graphs: the argument of `prepare`. If it is True, a call that can't be recorded raises an error.
    """

    def build(kind="llama", *, graphs=True, **changes):
        stock = make(kind, **changes)
        return hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=graphs), stock

    return build


@pytest.fixture
def ends_checked_late(recorded_on_cpu, monkeypatch):
    """Check the end of a call one step late, as on a GPU."""
    monkeypatch.setattr(deferred_stop, "devices", {"cpu"})
    monkeypatch.setattr(torch, "Event", _NoEvent)


@pytest.fixture
def launched(monkeypatch):
    """The steps that were launched early."""
    steps = []
    launch = Lookahead.launch

    def launching(self, *arguments):
        launch(self, *arguments)
        steps.extend(filter(None, [self.launched]))

    monkeypatch.setattr(Lookahead, "launch", launching)
    return steps


@pytest.fixture
def queued(monkeypatch):
    """The queued steps that had the right number of tokens.

    A step is queued before its tokens are on the host, here as often as possible.
    """
    monkeypatch.setattr(Lookahead, "_saves_time", lambda self, times: True)
    steps = []
    confirm = lookahead.confirm
    monkeypatch.setattr(lookahead, "confirm", lambda *arguments: steps.append(arguments) or confirm(*arguments))
    return steps


class _NoEvent:
    """A no-op event, for a CPU."""

    def __init__(self, **_):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


def prompt(rows=2, length=7, seed=0, padded=0):
    ids = torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs=None, *, new=12, seed=None, **arguments):
    if seed is not None:
        torch.manual_seed(seed)
    arguments.setdefault("do_sample", False)
    return model.generate(**(inputs or prompt()), max_new_tokens=new, **arguments)


def alike_from_threads(call, inputs, expected):
    """Whether concurrent calls return the expected results. Every input has a thread, which runs the call twice."""
    results = [None] * len(inputs)

    def run(index):
        for _ in range(2):
            results[index] = call(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(torch.equal(*both) for both in zip(results, expected, strict=True))


def counted(model):
    """(number of recordings, number of replayed steps) so far."""
    state = known(model)
    return (state.recorded, state.replayed)


def outlives_steps_of_others(prepared, stock, other, inputs, *, first):
    """Check that a step's outputs are still intact when transformers reads them after steps of another model.

    Another thread may run steps of the other model, and recordings share memory. first: whether the step of `prepared`
    is recorded before that of `other`.
    """
    between = []
    # This method runs between the step and the read.
    stocks = prepared._update_model_kwargs_for_generation

    def update(*args, **kwargs):
        for run in between:
            run()
        return stocks(*args, **kwargs)

    prepared._update_model_kwargs_for_generation = update
    for model in (prepared, other) if first else (other, prepared):
        generate(model, inputs)
    before = counted(prepared)[1], counted(other)[1]
    between.append(lambda: generate(other, inputs, new=6))
    assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert counted(prepared)[1] == before[0] + 11 and counted(other)[1] == before[1] + 12 * 5


class Streamer:
    """A streamer that collects the values it receives.

    actions: maps a number of values to a function, which is called with the last value once that many have arrived.
    """

    def __init__(self, actions=None):
        self.values = []
        self._actions = actions or {}

    def put(self, value):
        self.values.append(value.tolist())
        self._actions.get(len(self.values), lambda _: None)(value)

    def end(self):
        self.values.append("end")


@pytest.fixture
def chosen(monkeypatch):
    """Count the steps whose tokens came from replayed draws, and those whose tokens came from a recorded argmax."""
    counts = Counter()
    draw, largest = RecordedDraw.draw, token_choice._Processed.__torch_function__.__func__

    def drawing(self, generator=None):
        # A draw from a separate generator belongs to a comparison.
        counts["drawn"] += generator is None
        return draw(self, generator)

    def taking(cls, function, types, args=(), kwargs=None):
        result = largest(cls, function, types, args, kwargs)
        tokens = result.tensor() if isinstance(result, loop_rows.Tokens) else result
        counts["largest"] += function is torch.argmax and tokens is args[0].step.recorded.last_tokens
        return result

    monkeypatch.setattr(RecordedDraw, "draw", drawing)
    monkeypatch.setattr(token_choice._Processed, "__torch_function__", classmethod(taking))
    return counts


def same(prepared, stock, inputs=None, *, seed=0, **arguments):
    """Whether tokens and the random state after a call equal stock's."""
    results = []
    for model in (prepared, stock):
        tokens = generate(model, copy.deepcopy(inputs), seed=seed, **arguments)
        results.append((tokens, torch.get_rng_state()))
    return all(map(torch.equal, *results))
