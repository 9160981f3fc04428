"""Rotary embedding modules run the kernel and return stock's results; unsupported or changed ones run stock code."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.ops.rotary_angles import stock as formula
from hf_rocm.overlay import bind
from hf_rocm.overlay.activate import activate, deactivate
from tests.overlay.conftest import installed_package
from tests.replacing import replaced

RELEASE = Version(transformers.__version__)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
# model → the class of its rotary embedding. From the releases in `BY_TYPE` on, its forward takes the layer type.
CLASSES = {
    "llama": "LlamaRotaryEmbedding",
    "gemma3": "Gemma3RotaryEmbedding",
    "gpt_oss": "GptOssRotaryEmbedding",
    "cohere": "CohereRotaryEmbedding",
    "olmo2": "Olmo2RotaryEmbedding",
    "olmo3": "Olmo3RotaryEmbedding",
}
BY_TYPE = {"gemma3": Version("5.0"), "olmo3": Version("5.13")}
IDS = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 1000, 40000, 131071]])


@pytest.fixture(autouse=True)
def calls():
    """A user's kernel serves the operation, as the Triton kernel does on a GPU. Yields the dtypes of its calls."""
    served = []

    def kernel(inv_freq, position_ids, scaling, layout, dtype):
        served.append(dtype)
        return formula(inv_freq, position_ids, scaling, layout, dtype)

    remove = ops.register("rotary_angles", name="test", call=kernel, refuses=lambda *_: None, check=False)
    yield served
    remove()
    deactivate()


def embedding(model="llama", kind=None, **settings):
    if not (installed_package() / "models" / model).is_dir():
        pytest.skip(f"transformers {RELEASE} has no {model}")
    activate(model, everywhere=False)
    if kind is not None:
        settings["rope_scaling"] = {"rope_type": kind, "factor": 4.0, **settings.pop("terms", {})}
    name = "gemma3_text" if model == "gemma3" else model
    config = AutoConfig.for_model(name, **SIZES, **settings)
    home = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    module = getattr(home, CLASSES[model])(config=config)
    bind.set_mode(module, bind.ON)
    return module


def run_both(module, x, position_ids=IDS, *further, **keywords):
    bind.set_mode(module, bind.OFF)
    stock = module(x, position_ids, *further)
    bind.set_mode(module, bind.ON)
    return module(x, position_ids, *further, **keywords), stock


def assert_equal(actual, stock):
    for one, other in zip(actual, stock, strict=True):
        assert one.dtype == other.dtype and not one.requires_grad
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", CLASSES)
def test_results_equal_stock(model, dtype, calls):
    module = embedding(model)
    further = ("full_attention",) if BY_TYPE.get(model, Version("99")) <= RELEASE else ()
    actual, stock = run_both(module, torch.zeros(1, dtype=dtype), IDS, *further)
    assert_equal(actual, stock)
    assert calls == [stock[0].dtype]


TERMS = {
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("kind", TERMS)
def test_types_with_constant_frequencies_are_served(kind, calls):
    module = embedding(kind=kind, terms=TERMS[kind])
    assert module.rope_type == kind and (kind == "yarn") == (module.attention_scaling != 1.0)
    assert_equal(*run_both(module, torch.zeros(1, dtype=torch.bfloat16)))
    assert len(calls) == 1 and noted(module) is None


@pytest.mark.parametrize(
    ("kind", "terms"),
    [
        ("dynamic", {}),
        (
            "longrope",
            {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 16},
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_types_whose_frequencies_change_stay_stock_with_the_reason(kind, terms, calls):
    module, other = (embedding(kind=kind, terms=terms) for _ in range(2))
    bind.set_mode(other, bind.OFF)
    x, lengths = torch.zeros(1), (8, 200, 8)
    for length in lengths:
        position_ids = torch.arange(length)[None]
        assert_equal(module(x, position_ids), other(x, position_ids))
    assert not calls and noted(module) == f"its rotary embedding of type {kind} depends on the length of the call"


def test_a_changed_decorator_of_transformers_keeps_stock(calls):
    module = embedding()
    home = importlib.import_module("transformers.modeling_rope_utils")
    with replaced(vars(home), "dynamic_rope_update", lambda function: lambda forward: function(forward)):
        module(torch.zeros(1), IDS)
        assert not calls and "dynamic_rope_update" in noted(module)
    module(torch.zeros(1), IDS)
    assert calls and noted(module) is None


def test_frequencies_that_the_user_sets_are_read_in_every_call(calls):
    module = embedding()
    with torch.no_grad():
        module.inv_freq.mul_(0.5)
    module.attention_scaling = 2.0
    actual, stock = run_both(module, torch.zeros(1))
    assert_equal(actual, stock)
    assert actual[0][1, 0, 0] == 2.0 and len(calls) == 1
    module.inv_freq = module.inv_freq * 0.5
    assert_equal(*run_both(module, torch.zeros(1)))
    assert len(calls) == 2


CHANGES = {
    "fp64": lambda: (embedding().double(), torch.zeros(1, dtype=torch.float64), IDS),
    "three rows of positions": lambda: (embedding(), torch.zeros(1), IDS[None]),
    "positions in fp32": lambda: (embedding(), torch.zeros(1), IDS.float()),
    "a factor in a tensor": lambda: (_with_tensor(embedding()), torch.zeros(1), IDS),
}


def _with_tensor(module):
    module.attention_scaling = torch.tensor(1.5)
    return module


@pytest.mark.parametrize("change", ["a factor in a tensor", "three rows of positions"])
def test_unsupported_calls_stay_stock(change, calls):
    if change == "three rows of positions" and Version("5.19") > RELEASE:
        pytest.skip("stock needs two dims")
    assert_equal(*run_both(*CHANGES[change]()))
    assert not calls


@pytest.mark.parametrize("change", ["fp64", "positions in fp32"])
def test_calls_that_the_kernel_refuses_stay_stock(change, calls):
    module, x, position_ids = CHANGES[change]()
    with options.override(tier="rope=torch"), ops.recording() as routes:
        assert_equal(*run_both(module, x, position_ids))
    assert not calls and not routes


@pytest.mark.parametrize("guard", ["autocast", "vmap", "required aiter"])
def test_calls_under_autocast_and_transforms_stay_stock(guard, calls):
    module, x = embedding(), torch.zeros(1)
    stock, _ = run_both(module, x)
    calls.clear()
    required = {**options.current().aiter, "rope": options.Switch.REQUIRED}
    context = {"autocast": torch.autocast("cpu", torch.bfloat16), "required aiter": options.override(aiter=required)}
    with context.get(guard, nullcontext()):
        if guard == "vmap":
            actual = torch.vmap(lambda ids: module(x, ids))(IDS[:, None])
            actual = tuple(part.squeeze(1) for part in actual)
        else:
            actual = module(x, IDS)
    assert_equal(actual, stock)
    assert not calls


def test_keywords_are_passed_as_in_stock(calls):
    module = embedding()
    expected = module(torch.zeros(1), IDS)
    assert_equal(module(x=torch.zeros(1), position_ids=IDS), expected)
    assert_equal(module(torch.zeros(1), position_ids=IDS), expected)
    assert len(calls) == 3
    with pytest.raises(TypeError):
        module(torch.zeros(1))


def test_gradients_of_the_input_do_not_matter(calls):
    actual, stock = run_both(embedding(), torch.zeros(1, requires_grad=True))
    assert_equal(actual, stock)
    assert len(calls) == 1


class TestUsersCode:
    def test_a_forward_on_the_class_is_called(self, calls, monkeypatch):
        module = embedding()
        monkeypatch.setattr(type(module), "forward", lambda self, x, position_ids: "the user's")
        assert module(torch.zeros(1), IDS) == "the user's" and not calls

    def test_a_forward_on_the_instance_is_called(self, calls):
        module = embedding()
        module.forward = lambda x, position_ids: "the user's"
        assert module(torch.zeros(1), IDS) == "the user's" and not calls

    def test_a_subclass_runs_its_own_code(self, calls):
        stock = type(embedding())

        class Mine(stock):
            def forward(self, x, position_ids):
                return super().forward(x, position_ids + 1)

        module = Mine(config=AutoConfig.for_model("llama", **SIZES))
        bind.set_mode(module, bind.ON)
        assert_equal(module(torch.zeros(1), IDS), embedding()(torch.zeros(1), IDS + 1))
        assert len(calls) == 1, "a module of a user's class was served"

    def test_hooks_are_called(self, calls):
        module = embedding()
        module.register_forward_hook(lambda module, args, output: (output[1], output[0]))
        sin, cos = module(torch.zeros(1), IDS)
        assert cos[1, 0, 0] == 1 and sin[1, 0, 0] == 0 and len(calls) == 1

    def test_a_replaced_function_of_torch_is_called(self, calls):
        module, seen = embedding(), []

        def counting(function):
            return lambda *arguments, **keywords: seen.append(1) or function(*arguments, **keywords)

        with replaced(torch, "cat", counting):
            module(torch.zeros(1), IDS)
        assert seen and not calls


def test_an_inactive_module_and_a_deactivated_overlay_run_stock(calls):
    module = embedding()
    dispatcher = vars(type(module))["forward"]
    bind.set_mode(module, bind.OFF)
    module(torch.zeros(1), IDS)
    assert not calls
    deactivate()
    assert vars(type(module))["forward"] is dispatcher.__hf_rocm_binding__.stock


def test_explain_names_the_operation_and_the_reason(calls):
    config = AutoConfig.for_model("llama", **SIZES, num_hidden_layers=1, intermediate_size=64, vocab_size=32)
    model = hf_rocm.prepare(transformers.LlamaForCausalLM(config), force=True)
    kernels = {(kernel.operation, kernel.situation, kernel.tier) for kernel in hf_rocm.explain(model).kernels}
    assert ("rotary_angles", "8 frequencies, halves", "user") in kernels
    model.model.rotary_emb.rope_type = "dynamic"
    with torch.inference_mode():
        model(torch.arange(4)[None])
    explanation = hf_rocm.explain(model)
    (part,) = [part for part in explanation.parts if part.cls == "LlamaRotaryEmbedding"]
    assert part.stayed_stock == {"its rotary embedding of type dynamic depends on the length of the call": 1}
    assert "rotary_angles" not in {kernel.operation for kernel in explanation.kernels}
