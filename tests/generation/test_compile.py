"""torch.compile: hf_rocm's settings reach the compiler, the user's settings take precedence, and `restore` removes
hf_rocm's settings."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm.errors import OptionError
from hf_rocm.generation import compile as compiling


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def compiled(monkeypatch):
    """Record the settings passed to the compiler, then run the graph uncompiled."""
    recorded: list[dict] = []

    def compile_fx(graph, inputs, config_patches=None, **rest):
        recorded.append(dict(config_patches or {}))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    yield recorded
    torch._dynamo.reset()


IDS = torch.arange(5, 17)[None]


def run(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_the_settings_reach_the_compiler_but_not_the_global_config(model, compiled):
    from torch._inductor import config

    before = copy.deepcopy(config.get_config_copy())
    expected = run(model)
    assert hf_rocm.compile(model, force=True) is model
    assert torch.equal(run(model), expected)
    assert compiled and all(options.items() >= compiling.SETTINGS.items() for options in compiled)
    assert config.get_config_copy() == before


def test_without_rocm_and_force_a_model_is_compiled_as_in_stock(model, compiled):
    hf_rocm.compile(model)
    run(model)
    assert compiled and not any(set(options) & set(compiling.SETTINGS) for options in compiled)


def test_settings_of_the_user_take_precedence():
    options = compiling.arguments({"mode": "reduce-overhead", "options": {"memory_planning": True}})["options"]
    assert options["triton.cudagraphs"] is True and options["memory_planning"] is True
    assert options["max_autotune_gemm_backends"] == "ATEN"
    assert compiling.arguments({"backend": "eager", "dynamic": True}) == {"backend": "eager", "dynamic": True}
    assert compiling.arguments({"mode": "default", "fullgraph": True}) == {
        "fullgraph": True,
        "options": dict(compiling.SETTINGS),
    }


def test_an_unknown_override_raises_pytorchs_error(model, compiled):
    with pytest.raises(RuntimeError, match="no_such_option"):
        hf_rocm.compile(model, force=True, options={"no_such_option": 1})


def test_restore_removes_only_hf_rocms_compilation(model):
    hf_rocm.compile(model, backend="eager")
    assert model._compiled_call_impl is not None
    hf_rocm.restore(model)
    assert model._compiled_call_impl is None and not [name for name in model.__dict__ if name.startswith("_hf_rocm")]
    model.compile(backend="eager")
    hf_rocm.restore(model)
    assert model._compiled_call_impl is not None


def generate(model, **arguments):
    return model.generate(
        input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation="static", **arguments
    )


@pytest.fixture
def requests(monkeypatch):
    """Record the arguments with which transformers calls torch.compile, and compile nothing."""
    recorded: list[dict] = []

    def compile(function, **arguments):
        recorded.append(arguments)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_valid_auto_compile_criteria", lambda *a: True, raising=False)
    return recorded


def test_compilation_by_transformers_uses_the_settings(model, requests):
    expected = generate(model)
    # This is stock's setting.
    assert [options["mode"] for options in requests] == ["reduce-overhead"]
    hf_rocm.prepare(model, force=True, graphs=False)
    assert torch.equal(generate(model), expected)
    assert requests[1]["mode"] is None and requests[1]["options"] == dict(compiling.SETTINGS)
    hf_rocm.restore(model)
    assert torch.equal(generate(model), expected)
    assert requests[2]["mode"] == "reduce-overhead" and not requests[2]["options"]


def test_a_users_compile_config_is_unchanged(model, requests):
    config = transformers.CompileConfig(mode="max-autotune", dynamic=True)
    hf_rocm.prepare(model, force=True, graphs=False)
    generate(model, compile_config=config)
    assert [(options["mode"], options["options"]) for options in requests] == [("max-autotune", None)]


def test_copies_and_pickles_keep_the_settings(model, requests):
    hf_rocm.prepare(model, force=True, graphs=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        generate(twin)
    assert [options["mode"] for options in requests] == [None, None]


def test_a_model_on_the_cpu_compiles_like_stock_without_force(model):
    model.__dict__[compiling.AUTOMATIC] = "gpu"
    assert compiling.automatic(model, None) is None


def test_mixing_both_tf32_settings_raises_a_clear_error(model, monkeypatch):
    class Mixed:
        @property
        def allow_tf32(self):
            raise RuntimeError("PyTorch is checking whether allow_tf32 is enabled, but a mix of APIs was used")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Mixed())
    with pytest.raises(OptionError, match="TF32"):
        hf_rocm.compile(model)


def test_a_faulty_allocator_setting_causes_a_warning(model, monkeypatch, caplog):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    compiling.check()
    # NVIDIA builds accept both.
    assert not caplog.records
    monkeypatch.setattr(compiling, "is_rocm", lambda: True)
    compiling.check()
    assert "max_split_size_mb" in caplog.text
