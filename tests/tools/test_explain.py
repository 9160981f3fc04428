"""explain describes the current state of a model, as text and as data."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from torch import nn

import hf_rocm
from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.loading.prepare import REPORT
from hf_rocm.overlay import bind
from hf_rocm.tools import explain_short
from hf_rocm.tools.explain_text import Explanation
from hf_rocm.tools.explanation import Kernel
from tests.parity import models
from tests.parity.models import tokens


@pytest.fixture
def llama(tmp_path):
    return models.load_prepared(models.save_checkpoint("llama", tmp_path, torch.float32))


def part(model, name):
    return next(part for part in hf_rocm.explain(model).parts if part.cls == name)


def test_a_served_model_is_described_by_class_and_kernel(llama):
    with torch.inference_mode():
        explanation = hf_rocm.explain(llama)
    assert explanation.state == "served by hf_rocm, forced on this machine"
    # Models with installed overlays have no report.
    report = llama.__dict__.pop(REPORT)
    assert hf_rocm.explain(llama).state == explanation.state
    llama.__dict__[REPORT] = report
    assert explanation.machine["ROCm"] == "none" and explanation.machine["dtype"] == "float32"
    attention, mlp, norm = (
        next(part for part in explanation.parts if part.cls == name)
        for name in ("LlamaAttention", "LlamaMLP", "LlamaRMSNorm")
    )
    assert (attention.instances, attention.active, attention.fused) == (2, 2, 2)
    assert attention.group == ("q_proj", "k_proj", "v_proj") and attention.delivery == "in memory"
    assert mlp.fused == 2 and norm.group == () and norm.instances == 5
    routed = {(kernel.operation, kernel.tier) for kernel in explanation.kernels}
    assert {("attention", "torch"), ("linear", "torch"), ("act_and_mul", "torch"), ("rms_norm", "torch")} <= routed


def test_text_and_data_agree(llama):
    with torch.inference_mode():
        explanation = hf_rocm.explain(llama)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["parts"][0]["cls"] in explanation.details()
    for entry in data["kernels"]:
        assert (
            f"{entry['operation']} ({entry['situation']}): {entry['tier']}, {entry['kernel']}" in explanation.details()
        )
    assert "fused 2 of 2: q_proj + k_proj + v_proj" in explanation.details()


def test_the_short_form_names_every_class_and_every_reason_once(llama, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with torch.inference_mode():
        llama(input_ids=tokens(1, 4))
        explanation = hf_rocm.explain(llama)
    text = str(explanation)
    lines = text.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80 and repr(explanation) == text
    words = " ".join(text.split())
    assert "LlamaAttention 2 of 2 fused: q_proj + k_proj + v_proj" in words
    for cls in {type(module).__name__ for module in llama.modules()} - {"ModuleList"}:
        assert cls in text, cls
    reasons = {reason for kernel in explanation.kernels for _, reason in kernel.refused}
    assert reasons and all(words.count(reason) == 1 for reason in reasons)
    assert explanation._repr_html_().startswith("<pre>LlamaForCausalLM: served")


def test_the_details_state_a_shared_reason_once(llama):
    explanation = hf_rocm.explain(llama)
    reasons = [{reason for _, reason in kernel.refused} for kernel in explanation.kernels]
    shared = set.intersection(*reasons)
    assert shared, "no reason is shared on a machine without an AMD GPU"
    text = explanation.details()
    assert all(text.count(reason) == 1 for reason in set.union(*reasons))
    # Every refused kernel is named.
    for kernel in explanation.kernels:
        assert all(name in text for name, _ in kernel.refused)


def test_a_reason_of_one_operation_is_listed_below_it():
    def kernel(operation, *refused):
        return Kernel(operation, "decode", "torch", "eager", refused)

    kernels = (kernel("linear", ("aiter/a", "no GPU"), ("triton/b", "odd K")), kernel("norm", ("aiter/c", "no GPU")))
    explanation = Explanation("M", "served", machine={}, parts=(), without_overlay={}, kernels=kernels)
    assert explanation.details().splitlines()[-6:] == [
        "  refused in several operations: no GPU",
        "    linear (decode): not aiter/a",
        "    norm (decode): not aiter/c",
        "  linear (decode): torch, eager",
        "    not triton/b: odd K",
        "  norm (decode): torch, eager",
    ]


def test_names_with_commas_are_told_apart_and_listed_once():
    kernel = Kernel("linear", "decode", "torch", "eager", (("aiter/a", "no GPU"), ("aiter/a, sinks", "no GPU")))
    other = dataclasses.replace(kernel, operation="norm")
    explanation = Explanation("M", "served", {}, parts=(), without_overlay={}, kernels=(kernel, other, kernel))
    assert explanation.details().splitlines()[-4:] == [
        "  refused in several operations: no GPU",
        "    linear (decode); norm (decode): not aiter/a; aiter/a, sinks",
        "  linear (decode): torch, eager",
        "  norm (decode): torch, eager",
    ]


def test_the_short_form_omits_refused_kernels_of_the_tier_in_use():
    one = Kernel("experts", "prefill", "torch", "loop", (("aiter/a", "no GPU"), ("torch/bmm", "slower")))
    other = Kernel("experts", "decode", "aiter", "a", (("aiter/b", "odd"),))
    explanation = Explanation("M", "served", {}, parts=(), without_overlay={}, kernels=(one,))
    assert "torch/bmm: slower" in explanation.details()
    assert str(explanation).splitlines()[3:5] == ["kernels: experts by torch", "  not aiter: no GPU"]
    both = str(dataclasses.replace(explanation, kernels=(one, other))).splitlines()
    assert both[3:5] == ["kernels: experts by torch; experts by aiter", "  not aiter (experts for prefill): no GPU"]


def test_the_operations_of_an_attention_and_a_decoder_layer_are_listed(llama):
    kernels = {(kernel.operation, kernel.situation, kernel.tier) for kernel in hf_rocm.explain(llama).kernels}
    assert {("rope", "dim 16", "torch"), ("add_rms_norm", "w, 64", "torch")} <= kernels


def test_prepare_is_the_next_step_for_a_model_that_only_an_installed_overlay_serves(llama):
    assert hf_rocm.explain(llama).prepared and "next:" not in str(hf_rocm.explain(llama))
    modes = {module: bind.mode_of(module) for module in llama.modules()}
    hf_rocm.restore(llama)
    # Set the modes that plain loading with HF_ROCM_FORCE=1 sets.
    for module, mode in modes.items():
        if bind.binding_of(module) is not None:
            bind.set_mode(module, mode)
    explanation = hf_rocm.explain(llama)
    words = " ".join(str(explanation).split())
    assert "not fused: its layers were not prepared" in words and not explanation.prepared
    assert "next: hf_rocm.prepare(model) fuses its layers" in words


def stock_reasons(model):
    return {part.cls: part.reason for part in hf_rocm.explain(model).stock}


@pytest.mark.parametrize(
    ("forced", "reason"),
    [
        (True, "not prepared, and the overlay of stablelm is not bound"),
        (False, "the overlay of stablelm is not used on this machine"),
    ],
)
def test_classes_of_an_unbound_overlay_are_not_reported_as_unserved(forced, reason, monkeypatch):
    config = transformers.StableLmConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.StableLmForCausalLM(config).eval()
    # Other tests may have activated the overlay.
    hf_rocm.deactivate("stablelm")
    monkeypatch.setattr("hf_rocm.options.force_requested", lambda: forced)
    reasons = stock_reasons(model)
    attention = type(model.model.layers[0].self_attn).__name__
    assert reasons[attention] == reasons["StableLmMLP"] == reason
    assert reasons["StableLmModel"] == "no weights outside its layers"


def test_a_model_without_an_overlay_is_reported_before_it_is_prepared(monkeypatch):
    monkeypatch.setattr("hf_rocm.options.force_requested", lambda: False)
    config = transformers.MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1)
    model = transformers.MptForCausalLM(config).eval()
    reasons = stock_reasons(model)
    assert reasons["MptAttention"] == reasons["MptMLP"] == "hf_rocm has no overlay for mpt"
    explanation = hf_rocm.explain(model)
    assert explanation.without_overlay == {"mpt": "hf_rocm has no overlay for this model"}
    text = " ".join(str(explanation).split())
    assert text.count("has no overlay") == 1 and "next: hf_rocm.route_linear(model)" in text


def test_a_next_step_is_given_for_a_model_that_is_stock_because_there_is_no_rocm(monkeypatch):
    monkeypatch.setattr("hf_rocm.options.force_requested", lambda: False)
    config = transformers.StableLmConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    hf_rocm.deactivate("stablelm")
    explanation = hf_rocm.explain(transformers.StableLmForCausalLM(config).eval())
    assert not explanation.without_overlay and "next: hf-rocm doctor" in str(explanation)


@pytest.mark.parametrize("columns", ["70", "80", "120", "200"])
def test_a_count_is_on_the_same_line_as_its_class(llama, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = str(hf_rocm.explain(llama)).splitlines()
    assert any(" × " in line for line in lines)
    assert not any(line.lstrip().startswith("×") or line.rstrip().endswith("×") for line in lines)


def test_every_module_is_counted_once(llama):
    # A subclass of a stock class, as in remote code.
    class Attention(type(llama.model.layers[0].self_attn)):
        pass

    llama.model.layers[0].self_attn.__class__ = Attention
    with torch.no_grad():
        explanation = hf_rocm.explain(llama)
    modules = [module for module in llama.modules() if not isinstance(module, nn.ModuleList)]
    assert sum(part.instances for part in (*explanation.parts, *explanation.stock)) == len(modules)
    (subclass,) = (part for part in explanation.stock if part.cls == "Attention")
    assert subclass.instances == 1 and subclass.reason.startswith("Attention is a subclass of LlamaAttention;")
    assert "Attention is a subclass of LlamaAttention" in " ".join(str(explanation).split())


def test_a_next_step_is_given_for_a_model_without_an_overlay():
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    )
    model = hf_rocm.prepare(transformers.GPTNeoForCausalLM(config).eval(), force=True)
    assert "next: hf_rocm.route_linear(model)" in str(hf_rocm.explain(model))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_attention_of_a_lora_model_is_listed(llama):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = peft.get_peft_model(llama, config).eval()
    with torch.no_grad():
        explanation = hf_rocm.explain(adapted)
    assert {kernel.situation.split(",")[0] for kernel in explanation.kernels if kernel.operation == "attention"} == {
        "prefill",
        "padded batch",
        "decode",
    }
    reasons = {(part.cls, part.reason.split(",")[0]) for part in explanation.stock}
    assert ("lora.Linear", "code of peft") in reasons and "lora.Linear × " in str(explanation)
    assert "Linear" in {cls for cls, reason in reasons if reason != "code of peft"}


FUNCTIONS = ("compile", "dequantize", "explain", "prepare", "restore", "route_linear", "verify")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_object_that_is_not_a_model_is_an_error(name):
    with pytest.raises(OptionError, match=f"{name} takes a model") as caught:
        getattr(hf_rocm, name)("llama")
    assert caught.value.facts["found"] == "str" and "from_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    ("argument", "kind", "hint"),
    [
        (torch.nn.Linear, "the class Linear", "Linear.from_pretrained"),
        (SimpleNamespace(model=torch.nn.Identity()), "SimpleNamespace", "pass the `.model`"),
        (None, "NoneType", None),
    ],
)
def test_the_hint_fits_the_object_that_is_not_a_model(argument, kind, hint):
    with pytest.raises(OptionError, match="explain takes a model") as caught:
        hf_rocm.explain(argument)
    assert caught.value.facts["found"] == kind
    assert caught.value.hint is None if hint is None else hint in caught.value.hint


def test_a_list_of_names_is_refused_with_the_call_that_works():
    with pytest.raises(OptionError) as caught:
        hf_rocm.activate(["llama"])
    assert "hf_rocm.activate('llama', 'bert')" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("from_pretrained", 3, "takes the name of a model"),
        ("from_pretrained", torch.nn.Identity(), "takes the name of a model"),
        ("auto_prepare", torch.nn.Identity(), "takes True or False"),
    ],
)
def test_other_arguments_of_a_wrong_type_are_errors(name, argument, message):
    with pytest.raises(OptionError, match=f"{name} {message}") as caught:
        getattr(hf_rocm, name)(argument)
    assert caught.value.facts["found"] == type(argument).__name__ and "hf_rocm.prepare" in caught.value.hint


@pytest.mark.parametrize("name", ["golden", "save_golden"])
@pytest.mark.parametrize("wrong", [3, b"file"])
def test_a_file_that_is_not_a_path_is_an_error(name, wrong):
    with pytest.raises(OptionError, match=f"{name}={wrong!r} is not valid") as caught:
        hf_rocm.verify(torch.nn.Identity(), **{name: wrong})
    assert caught.value.facts == {"expected": "str or os.PathLike", "found": type(wrong).__name__}


def test_enabled_gradients_are_distinguished_from_reasons_not_to_fuse(llama):
    attention = part(llama, "LlamaAttention")
    assert attention.gradients and attention.fused == 2 and attention.not_fused == {}
    assert "not fused while gradients are enabled" in hf_rocm.explain(llama).details()
    words = " ".join(str(hf_rocm.explain(llama)).split())
    assert "in direct calls while gradients are enabled: use torch.inference_mode(); generate does this itself" in words
    with torch.no_grad():
        assert not part(llama, "LlamaAttention").gradients
        assert "gradients" not in hf_rocm.explain(llama).details()


def test_changes_after_prepare_are_reported(llama):
    attention = llama.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda *arguments: None)
    llama.model.layers[1].mlp.up_proj = nn.Identity()
    with torch.no_grad():
        assert part(llama, "LlamaAttention").fused == 1
        assert "hook" in next(iter(part(llama, "LlamaAttention").not_fused))
        assert "Identity" in next(iter(part(llama, "LlamaMLP").not_fused))


def test_the_reason_of_a_stock_call_is_reported(llama):
    with torch.no_grad():
        llama(input_ids=tokens(1, 4))
        assert part(llama, "LlamaAttention").stayed_stock == {}
        llama.config._attn_implementation = "eager"
        llama(input_ids=tokens(1, 4))
        assert "'eager'" in next(iter(part(llama, "LlamaAttention").stayed_stock))
        llama.config._attn_implementation = "sdpa"
        llama(input_ids=tokens(1, 4))
        assert part(llama, "LlamaAttention").stayed_stock == {}


def test_every_refusal_names_the_selected_tier(llama):
    with torch.no_grad(), options.override(tier="eager"):
        kernels = hf_rocm.explain(llama).kernels
        assert {kernel.tier for kernel in kernels} == {"eager"}
        assert all("the eager tier was requested" in dict(kernel.refused).values() for kernel in kernels)
    with torch.no_grad(), options.override(tier="triton"):
        kernels = hf_rocm.explain(llama).kernels
        assert {kernel.tier for kernel in kernels} == {"none"}
        assert all("triton" in " ".join(reason for _, reason in kernel.refused).lower() for kernel in kernels)


def test_a_wrapper_around_a_bound_forward_is_named(llama, monkeypatch):
    cls = type(llama.model.layers[0].mlp)
    assert f"{cls.__name__}.forward" not in hf_rocm.explain(llama).details()
    bound = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: bound(self, x))
    explanation = hf_rocm.explain(llama)
    assert explanation.replaced == (f"{cls.__name__}.forward",)
    assert f"  {cls.__name__}.forward" in explanation.details().splitlines()


def test_a_class_that_runs_stock_is_listed_with_its_reason_in_both_forms(llama, monkeypatch):
    monkeypatch.setattr(bind, "refused", lambda cls: "a test refuses it" if cls.__name__ == "LlamaMLP" else None)
    explanation = hf_rocm.explain(llama)
    assert f"stock × {part(llama, 'LlamaMLP').active}: a test refuses it" in explanation.details()
    assert "stock: a test refuses it" in str(explanation)


def test_a_restored_model_is_reported_as_stock(llama):
    hf_rocm.restore(llama)
    explanation = hf_rocm.explain(llama)
    assert explanation.state.startswith("stock") and explanation.kernels == ()
    assert all(part.active == 0 for part in explanation.parts)


def test_explaining_changes_nothing(llama):
    before = {path: dict(vars(module)) for path, module in llama.named_modules()}
    with torch.no_grad():
        hf_rocm.explain(llama)
    after = {path: dict(vars(module)) for path, module in llama.named_modules()}
    assert before.keys() == after.keys() and all(before[path].keys() == after[path].keys() for path in before)
    assert bind.mode_of(llama.model.layers[0].mlp) == bind.ON


def test_reasons_of_nested_models_are_not_left_out():
    lines = (
        "forwards run uncaptured: X",
        "uncaptured × 2: X",
        "uncaptured × 4: Y",
        "text_model: forwards run uncaptured: X",
        "text_model: uncaptured × 3: X",
        "text_model: uncaptured × 4: Y",
        "vision_model: forwards are recorded and replayed",
        "the steps' inputs are prepared by transformers: Y",
    )
    assert [lines.index(line) for line in explain_short._distinct(lines)] == [0, 2, 3, 5, 6]
