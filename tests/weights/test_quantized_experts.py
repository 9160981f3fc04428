"""`quantize="mxfp4"` for stacked experts: results, memory, state dicts, `restore`, `dequantize`, and refusals."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.errors import OptionError
from hf_rocm.weights import quantize as quantizing
from tests.tolerance import assert_as_good_as_eager
from tests.weights.models import IDS, logits
from tests.weights.mxfp4_rounding import rounded

if Version(transformers.__version__) < Version("4.55"):
    pytest.skip("not run: needs transformers 4.55, the first with gpt-oss", allow_module_level=True)

from hf_rocm.weights.quantized_experts import QuantizedExperts
from tests.weights import mxfp4_checkpoints as gpt_oss

# In 4.x, the other models below have lists of experts.
STACKED = Version(transformers.__version__) >= Version("5")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
MODELS = ["GptOss", *(["Qwen3Moe", "Olmoe", "Mixtral"] if STACKED else [])]
LAYERS = 2
every_model = pytest.mark.parametrize("name", MODELS)
PATHS = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]


def build(name="GptOss", dtype=torch.float32, **changes):
    if name == "GptOss":
        return gpt_oss.build(**changes).to(dtype)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" not in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def quantized(name="GptOss", dtype=torch.float32, **arguments):
    return hf_rocm.quantize(hf_rocm.prepare(build(name, dtype), force=True), "mxfp4", force=True, **arguments)


def experts_of(model):
    return [(path, module) for path, module in model.named_modules() if isinstance(module, QuantizedExperts)]


def equal_states(model, other):
    """Returns whether two models have equal state dicts."""
    state, expected = model.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[key], value) for key, value in expected.items())


@every_model
def test_the_experts_run_in_mxfp4(name):
    model = quantized(name)
    assert [path.rpartition(".")[2] for path, _ in experts_of(model)] == ["experts"] * LAYERS
    with torch.no_grad(), ops.recording() as routes:
        actual = model(IDS, use_cache=False).logits
    names = [route.operation for route in routes]
    assert names.count("mxfp4_experts") == LAYERS and "experts" not in names
    with options.override(tiers={"experts": "eager", "linear": "eager"}):
        eager = logits(model)
    ordinary = hf_rocm.dequantize(copy.deepcopy(model)).double()
    # The default of transformers 5 does not support float64.
    ordinary.config._experts_implementation = "eager"
    assert_as_good_as_eager(actual, eager, logits(ordinary))
    assert not torch.equal(actual, logits(build(name)))


@every_model
def test_experts_are_rounded_to_the_nearest_numbers_and_take_less_memory(name):
    """Every number is rounded to the nearest one, or to either of two that are equally near."""
    model, stock = quantized(name), build(name)
    for path, experts in experts_of(model):
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(stock.get_submodule(path), part).detach()
            actual = experts.read(part).double()
            transposed = name == "GptOss"
            exact = rounded(weight.transpose(1, 2) if transposed else weight)[2]
            exact = exact.transpose(1, 2) if transposed else exact
            other = exact != actual
            assert torch.equal((exact - weight).abs()[other], (actual - weight).abs()[other])
            assert other.float().mean() < 0.01
            blocks, scales, _ = experts.packed(part)
            assert blocks.nbytes + scales.nbytes == weight.numel() * 4.25 / 8
        assert experts.replaced[0].down_proj.numel() == experts.replaced[0].gate_up_proj.numel() == 0
    report = json.loads(json.dumps(model.__dict__[quantizing.REPORT]))
    assert report["bytes"][1] == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert report["bytes"][1] < 0.25 * report["bytes"][0]
    assert 0.01 < report["error"]["mean"] < 0.2 and "e2m1" in report["format"]
    assert not [path for path in report["left"] if path.endswith("experts")]


@every_model
def test_restore_and_dequantize_return_ordinary_experts(name):
    stock = build(name)
    model = hf_rocm.prepare(build(name), force=True)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    hf_rocm.quantize(model, "mxfp4", force=True, keep="cpu")
    assert equal_states(model, stock)
    hf_rocm.restore(model)
    assert dict(model.named_modules()) == modules and not experts_of(model)
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(after[key] is value for key, value in parameters.items())
    assert all(parameter.requires_grad for parameter in after.values())
    assert equal_states(model, stock) and torch.equal(logits(model), logits(stock))
    assert not any(key.startswith("_hf_rocm") for module in model.modules() for key in module.__dict__)

    again = quantized(name)
    with pytest.raises(OptionError, match="its original weights were not kept"):
        hf_rocm.restore(again)
    weights = {path: experts.read("gate_up_proj") for path, experts in experts_of(again)}
    state = again.state_dict()
    hf_rocm.dequantize(again)
    assert not experts_of(again)
    assert all(torch.equal(again.get_submodule(path).gate_up_proj, weight) for path, weight in weights.items())
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    hf_rocm.prepare(again, force=True)
    with torch.no_grad(), ops.recording() as routes:
        again(IDS)
    assert [route.operation for route in routes].count("experts") == LAYERS


@every_model
def test_state_dicts_copies_and_dtypes_are_supported(name):
    model = quantized(name, torch.bfloat16)
    expected, state = logits(model), {key: value.clone() for key, value in model.state_dict().items()}
    assert state.keys() == build(name).state_dict().keys() and {value.dtype for value in state.values()} == {
        torch.bfloat16
    }
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(logits(other), expected)
    model.load_state_dict({key: torch.zeros_like(value) for key, value in state.items()})
    assert not torch.equal(logits(model), expected)
    # Values that MXFP4 can represent are not changed by rounding.
    model.load_state_dict(state)
    assert torch.equal(logits(model), expected)
    key = next(key for key in state if key.endswith("experts.down_proj"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, key: state[key][:-1]})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({other: value for other, value in state.items() if other != key})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, f"{key}_g_idx": state[key]})
    nn.Module.to(model, torch.float32)
    assert experts_of(model)[0][1].dtype == torch.float32 and torch.isfinite(logits(model)).all()
    assert {tensor.dtype for tensor in experts_of(model)[0][1].buffers()} == {torch.uint8}


@every_model
def test_quantised_experts_are_loaded_and_saved(name, tmp_path):
    stock = build(name)
    stock.save_pretrained(tmp_path / "stock")
    model = hf_rocm.from_pretrained(tmp_path / "stock", force=True, quantize="mxfp4", attn_implementation="eager")
    assert torch.equal(logits(model), logits(quantized(name)))
    with pytest.raises(OptionError, match="no format that has both experts"):
        hf_rocm.save_quantized(model, tmp_path / "packed")
    model.save_pretrained(tmp_path / "saved")
    loaded = type(stock).from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert equal_states(loaded, model)


@every_model
def test_the_order_of_prepare_and_quantize_does_not_matter(name):
    before = quantized(name)
    expected = logits(before)
    assert torch.equal(logits(hf_rocm.prepare(before, force=True)), expected)
    hf_rocm.dequantize(before)
    unprepared = hf_rocm.restore(hf_rocm.prepare(build(name), force=True))
    hf_rocm.quantize(unprepared, "mxfp4", force=True)
    assert len(experts_of(unprepared)) == LAYERS
    assert torch.equal(logits(hf_rocm.prepare(unprepared, force=True)), expected)


def test_explain_lists_the_quantised_experts():
    text = hf_rocm.explain(quantized()).details()
    assert "mxfp4_experts" in text and "2 of 6, 64 × 96" in text and "in mxfp4 (e2m1 in blocks of 32)" in text


def test_quantised_experts_compile_into_one_graph():
    experts = experts_of(quantized("GptOss", torch.bfloat16))[0][1]
    torch._dynamo.reset()
    arguments = torch.randn(7, 64).bfloat16(), torch.tensor([[0, 3]] * 7), torch.rand(7, 2).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, backend="eager")(*arguments)
        assert torch.equal(compiled, experts(*arguments))


@pytest.mark.parametrize("kind", ["int8", "int4-g32"])
def test_other_kinds_do_not_quantise_the_experts(kind):
    model = hf_rocm.quantize(hf_rocm.prepare(build(), force=True), kind, force=True)
    left = model.__dict__[quantizing.REPORT]["left"]
    assert {left[path] for path in PATHS} == {"stacked experts are quantised only in mxfp4"}
    explanation = hf_rocm.explain(model)
    assert explanation.not_quantized["stacked experts are quantised only in mxfp4"] == LAYERS
    assert f"not quantised × {LAYERS}: stacked experts are quantised only in mxfp4" in explanation.details()
    assert not hf_rocm.explain(build()).not_quantized
    assert not experts_of(model)


def _hook(experts):
    experts.register_forward_hook(lambda *_: None)


def _own_forward(experts):
    experts.forward = lambda *arguments: arguments[0]


def _other_class(experts):
    experts.__class__ = type("Other", (type(experts),), {})


def _width(experts):
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:, :, :-2].clone())
    experts.gate_up_proj_bias = nn.Parameter(experts.gate_up_proj_bias[:, :-2].clone())
    experts.down_proj = nn.Parameter(experts.down_proj[:, :-1].clone())


def _meta(experts):
    experts.to("meta")


def _double(experts):
    experts.double()


def _fewer(experts):
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter[:3].clone()))


def _parallel(experts):
    experts._hf_tp_plan = "grouped_gemm"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_hook, "the experts have a forward hook"),
        (_own_forward, "the forward of the experts was replaced"),
        (_other_class, "no overlay describes the layout"),
        (_width, "the sizes 64 × 95 of the experts are not both multiples of 32"),
        (_meta, "gate_up_proj is on the meta device"),
        (_double, "gate_up_proj is torch.float64"),
        (_parallel, "the experts are distributed across several devices"),
        (_fewer, "the experts are distributed across several devices"),
    ],
)
def test_unsupported_experts_are_not_quantised(spoil, reason):
    model = build()
    experts = model.get_submodule(PATHS[0])
    spoil(experts)
    hf_rocm.quantize(model, "mxfp4", force=True)
    left = model.__dict__[quantizing.REPORT]["left"]
    assert reason in left[PATHS[0]] and PATHS[1] not in left
    assert model.get_submodule(PATHS[0]) is experts and len(experts_of(model)) == 1


def test_shared_and_excluded_experts_are_not_quantised():
    model = build()
    model.get_submodule(PATHS[1]).down_proj = model.get_submodule(PATHS[0]).down_proj
    hf_rocm.quantize(model, "mxfp4", force=True)
    left = model.__dict__[quantizing.REPORT]["left"]
    assert all("share memory" in left[path] for path in PATHS)
    left = quantized(exclude=["experts"]).__dict__[quantizing.REPORT]["left"]
    assert [left[path] for path in PATHS] == ["excluded by 'experts'"] * LAYERS


@pytest.mark.skipif(not STACKED, reason="not run: needs stacked experts, in transformers 5")
def test_experts_with_an_unsupported_activation_are_not_quantised():
    model = hf_rocm.prepare(build("Qwen3Moe", hidden_act="relu"), force=True)
    hf_rocm.quantize(model, "mxfp4", force=True)
    assert "activation is not supported" in model.__dict__[quantizing.REPORT]["left"][PATHS[0]]
