"""quantize: kernels, rounding errors, unquantised layers, refusals, `dequantize`, `restore`, and 4-bit weights."""

from __future__ import annotations

import copy
import json
import logging
import pickle

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.errors import OptionError
from hf_rocm.ops import four_bit
from hf_rocm.overlay import bind
from hf_rocm.weights import eight_bit as eight_bit_weights
from hf_rocm.weights import quantize as quantizing
from hf_rocm.weights.eight_bit import EightBitWeight
from hf_rocm.weights.quantized import QuantizedLinear
from tests import eight_bit
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models
from tests.weights.models import GROUPS, IDS, LAYERS, assert_same_results, logits

LINEARS = 7 * LAYERS
FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SHAPES = [(128, 64), (64, 64), (160, 64), (64, 80)]  # [N, K] of q+k+v, o, gate+up and down

every_kind = pytest.mark.parametrize("kind", FORMATS)
# The models of this file are narrower than a group of 128.
FOUR_BITS = ["int4-g32", "int4-g64"]


@pytest.fixture(autouse=True, scope="module")
def checked():
    eight_bit.check_all()


def quantized(kind="int8", *, prepare=True, keep=None, exclude=(), **sizes):
    model = models.build(**sizes)
    if prepare:
        hf_rocm.prepare(model, force=True)
    return hf_rocm.quantize(model, kind, force=True, keep=keep, exclude=exclude)


def logits_and_gemms(model, ids=IDS):
    """Return (the logits, the shapes of the quantised weights in GEMMs, the number of other GEMMs)."""
    with torch.no_grad(), ops.recording() as routes:
        output = model(ids, use_cache=False).logits
    shapes = [route.shapes[1] for route in routes if route.operation == "quantized_linear"]
    return output, shapes, sum(route.operation in ("linear", "shuffled_linear") for route in routes)


def traces(model):
    return [name for module in model.modules() for name in module.__dict__ if "hf_rocm" in name]


@every_kind
@pytest.mark.parametrize("prepare", [True, False])
def test_every_block_runs_in_8_bits_with_one_gemm_per_group_if_prepared(kind, prepare):
    model = quantized(kind, prepare=prepare)
    actual, shapes, others = logits_and_gemms(model)
    assert others == 0
    if prepare:
        assert shapes == SHAPES * LAYERS
    else:
        assert len(shapes) == LINEARS
    with options.override(tiers={"linear": "eager"}):
        eager = logits(model)
    assert_as_good_as_eager(actual, eager, logits(models.build().double()))
    assert not torch.equal(actual, logits(models.build()))
    layers = dict(quantizing.layers(model))
    assert len(layers) == LINEARS and {layer.quantized.data.dtype for layer in layers.values()} == {FORMATS[kind]}


@every_kind
def test_the_rounding_error_is_within_the_bound_of_the_format(kind):
    stock = models.build()
    for path, layer in quantizing.layers(quantized(kind)):
        weight = stock.get_submodule(path).weight
        assert layer.weight.dtype == weight.dtype and (layer.in_features, layer.out_features) == weight.shape[::-1]
        error = (layer.weight.double() - weight.double()).abs()
        assert (error <= eight_bit.rounding_error(weight, FORMATS[kind]) * (1 + 1e-6)).all() and error.any()


def test_the_report_has_builtin_types_and_the_loss(caplog):
    with caplog.at_level(logging.INFO, logger="hf_rocm"):
        model = quantized("fp8")
    report = json.loads(json.dumps(model.__dict__[quantizing.REPORT]))
    assert report["layers"] == LINEARS and report["left"] == {"lm_head": "it is not part of a repeated block"}
    assert 0 < report["error"]["mean"] <= report["error"]["max"] < 2**-4 and report["error"]["worst"].startswith(
        "model."
    )
    before, after = report["bytes"]
    assert before == sum(parameter.nbytes for parameter in models.build().parameters()) + _buffers(model)
    rest = sum(parameter.nbytes for parameter in model.parameters()) + _buffers(model)
    packed = sum(
        layer.in_features * layer.out_features + 4 * layer.out_features for _, layer in quantizing.layers(model)
    )
    assert after == rest + packed
    assert "14 layers in fp8 (float8_e4m3fn)" in caplog.text and "the mean error of their outputs is" in caplog.text
    with torch.no_grad():
        explanation = hf_rocm.explain(model)
    assert "layers in int8, " in hf_rocm.explain(quantized("int8")).quantized
    assert explanation.quantized in explanation.details() and explanation.quantized.startswith("14 layers in fp8")
    kernels = {
        kernel.situation: kernel.kernel for kernel in explanation.kernels if kernel.operation == "quantized_linear"
    }
    assert kernels["q_proj + k_proj + v_proj, 128 × 64"] == eight_bit.served_by(FORMATS["fp8"], torch.float32)
    assert len(kernels) == 4
    assert {"attention", "act_and_mul"} <= {kernel.operation for kernel in explanation.kernels}
    assert all(part.fused == part.active for part in explanation.parts if part.group)


def _buffers(model):
    return sum(named_buffer.nbytes for name, named_buffer in model.named_buffers() if "quantized" not in name)


def _spoil_hook(model):
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)


def _spoil_tie(model):
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def _spoil_meta(model):
    model.model.layers[0].mlp.up_proj.to("meta")


def _spoil_class(model):
    class Other(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj.__class__ = Other


def _spoil_size(model):
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 81)


def _spoil_dtype(model):
    model.model.layers[0].mlp.up_proj.double()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_spoil_hook, "it has a forward hook"),
        (_spoil_tie, "share memory"),
        (_spoil_meta, "it has a weight that is on the meta device"),
        (_spoil_class, "not a plain nn.Linear"),
        (_spoil_size, "81 × 64 are not multiples of 16"),
        (_spoil_dtype, "its weight is torch.float64"),
    ],
)
def test_layers_that_cannot_be_quantised_are_listed(spoil, words):
    model = models.build()
    spoil(model)
    left = model.model.layers[0].mlp.up_proj
    hf_rocm.quantize(model, "int8", force=True)
    assert model.model.layers[0].mlp.up_proj is left
    assert words in model.__dict__[quantizing.REPORT]["left"]["model.layers.0.mlp.up_proj"]
    assert isinstance(model.model.layers[0].mlp.gate_proj, QuantizedLinear)


def test_a_group_with_an_excluded_layer_runs_layer_by_layer():
    model = models.prepared()
    hf_rocm.quantize(model, "int8", force=True, exclude=["model.layers.0.*.up_proj", "k_proj"])
    left = model.__dict__[quantizing.REPORT]["left"]
    assert left["model.layers.0.mlp.up_proj"] == "excluded by 'model.layers.0.*.up_proj'" and len(left) == 2 + LAYERS
    _, shapes, others = logits_and_gemms(model)
    assert shapes == [(64, 64), (32, 64), (64, 64), (80, 64), (64, 80), (64, 64), (32, 64), *SHAPES[1:]] and others == 0


def test_routers_and_experts_are_not_quantised():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(64, 16)
            self.experts = nn.ModuleList([nn.Linear(64, 64)])
            self.shared_expert = nn.Linear(64, 64)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 64, 64))

    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Fused()])
    hf_rocm.quantize(model.eval(), "int8", force=True)
    assert [path for path, _ in quantizing.layers(model)] == ["layers.0.shared_expert"]
    assert model.__dict__[quantizing.REPORT]["left"] == {
        "layers.0.gate": "it is a router",
        "layers.0.experts.0": "lists of experts are not quantised",
        "layers.1": "stacked experts are quantised only in mxfp4",
    }


def test_the_base_of_an_adapter_is_not_quantised():
    model = models.build()
    wrapped = nn.Module()
    wrapped.base_layer = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = wrapped
    hf_rocm.quantize(model, "int8", force=True)
    left = model.__dict__[quantizing.REPORT]["left"]
    assert left["model.layers.0.mlp.up_proj.base_layer"] == "it is the base of an adapter, which may be merged into it"


def test_layers_that_a_model_keeps_in_fp32_are_not_quantised():
    model = models.build()
    model._keep_in_fp32_modules = ["down_proj"]
    hf_rocm.quantize(model, "int8", force=True)
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert model.__dict__[quantizing.REPORT]["left"]["model.layers.1.mlp.down_proj"] == "the model keeps it in fp32"


class TestRefusals:
    def refused(self, words, model=None, kind="int8", **arguments):
        model = models.build() if model is None else model
        before = dict(model.named_modules()) if isinstance(model, nn.Module) else None
        with pytest.raises(OptionError) as caught:
            hf_rocm.quantize(model, kind, **{"force": True, **arguments})
        assert words in str(caught.value)
        assert before is None or (dict(model.named_modules()) == before and not traces(model))

    def test_invalid_arguments_are_refused(self):
        self.refused("quantize has no kind 'int3'", kind="int3")
        self.refused("can't keep the originals on 'disk'", keep="disk")
        self.refused("HF_ROCM_FORCE=1 enables it", force=None)
        self.refused("because  force=False", force=False)
        self.refused("quantize takes a model", model="llama")

    def test_unsupported_models_are_refused(self):
        self.refused("call model.eval() first", model=models.build().train())
        self.refused("no layer that can be quantised", model=nn.Sequential(nn.Linear(16, 16)).eval())
        by_another = models.build()
        by_another.config.quantization_config = type("Config", (), {"quant_method": "gptq"})()
        self.refused("already quantised, by gptq", model=by_another)

    def test_a_quantised_model_is_not_quantised_again(self):
        model = quantized()
        layers = quantizing.layers(model)
        with pytest.raises(OptionError, match="already quantised"):
            hf_rocm.quantize(model, "fp8", force=True)
        assert quantizing.layers(model) == layers

    @pytest.mark.parametrize(
        ("arch", "format", "rounds"),
        [("gfx90a", torch.float8_e4m3fn, False), ("gfx942", torch.float8_e4m3fnuz, True)],
    )
    def test_the_fp8_type_depends_on_the_arch(self, arch, format, rounds, monkeypatch):
        """On an arch without fp8 GEMMs, weights are dequantised, and x is not rounded."""
        monkeypatch.setattr(eight_bit_weights, "describe", lambda device: Device("cuda", rocm=True, arch=arch))
        monkeypatch.setattr(EightBitWeight, "_is_better_shuffled", lambda *_: False)
        model = quantized("fp8")
        weight = model.model.layers[0].mlp.up_proj.quantized
        assert weight.data.dtype == format and weight.rounds is rounds
        with ops.recording() as routes:
            assert torch.isfinite(logits(model)).all()
        names = {route.name for route in routes if route.operation == "quantized_linear"}
        assert ("dequantize, F.linear" in names) is not rounds and len(names) == 1

    def test_quantised_layers_refuse_gradients(self):
        model = quantized()
        output = model(IDS, use_cache=False).logits
        assert not output.requires_grad and not any(parameter.requires_grad for parameter in model.parameters())
        embedded = model.get_input_embeddings()(IDS).requires_grad_()
        with pytest.raises(OptionError, match="quantised layers don't support gradients"):
            model(inputs_embeds=embedded, use_cache=False)


class TestRestoreAndDequantize:
    def test_restore_is_refused_if_the_originals_were_not_kept(self):
        model = quantized()
        before = logits(model)
        with pytest.raises(OptionError, match="its original weights were not kept") as caught:
            hf_rocm.restore(model)
        assert "hf_rocm.dequantize(model)" in str(caught.value)
        actual, shapes, _ = logits_and_gemms(model)
        assert torch.equal(actual, before) and shapes == SHAPES * LAYERS

    @every_kind
    def test_kept_originals_are_restored_bitwise(self, kind, stock):
        model = models.build()
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        model.model.norm.weight.requires_grad_(False)
        hf_rocm.prepare(model, force=True)
        hf_rocm.quantize(model, kind, force=True, keep="cpu")
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, stock.state_dict()[name])
        assert hf_rocm.restore(model) is model
        assert dict(model.named_modules()) == modules and not traces(model)
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name] and torch.equal(parameter, stock.get_parameter(name))
            assert parameter.requires_grad is (name != "model.norm.weight")
        assert_same_results(model, stock)

    def test_dequantized_layers_are_ordinary_and_fused_again(self):
        model = quantized("fp8")
        weights = {path: layer.weight for path, layer in quantizing.layers(model)}
        hf_rocm.dequantize(model)
        assert quantizing.layers(model) == [] and all(parameter.requires_grad for parameter in model.parameters())
        for path, weight in weights.items():
            layer = model.get_submodule(path)
            assert type(layer) is nn.Linear and torch.equal(layer.weight, weight)
        models.assert_matches_stock(model, GROUPS)
        hf_rocm.restore(model)
        assert not traces(model)


def test_without_rocm_the_hint_begins_with_the_argument(monkeypatch):
    monkeypatch.setattr(options, "force_requested", lambda: False)
    with pytest.raises(OptionError, match="ROCm path, which is disabled") as refused:
        hf_rocm.prepare(models.build(), quantize="int8")
    assert refused.value.hint.startswith("force=True ") and "--force" not in refused.value.hint


def test_from_pretrained_quantises_while_loading(tmp_path):
    models.build().save_pretrained(tmp_path)
    model, info = hf_rocm.from_pretrained(tmp_path, quantize="fp8", force=True, output_loading_info=True)
    assert not info["missing_keys"] and logits_and_gemms(model)[1] == SHAPES * LAYERS
    with pytest.raises(OptionError, match="quantize has no kind 'fp4'"):
        hf_rocm.from_pretrained(tmp_path / "nowhere", quantize="fp4", force=True)
    with pytest.raises(OptionError, match="enables it on any machine"):
        hf_rocm.from_pretrained(tmp_path / "nowhere", quantize="fp8")


def test_an_unprepared_class_is_served_too():
    """The model is an `nn.Sequential`, for which there is no overlay."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(32, 48)]), nn.Linear(48, 16)).eval()
    hf_rocm.quantize(model, "fp8", force=True)
    layer = model[0][0]
    assert isinstance(layer, QuantizedLinear) and type(model[1]) is nn.Linear and bind.mode_of(layer) == bind.OFF
    assert layer(torch.randn(2, 3, 32)).shape == (2, 3, 48) and layer(torch.randn(0, 32)).shape == (0, 48)


class TestFourBits:
    """Differences from 8 bits: groups along the rows, and widths that are not a multiple of the group size."""

    @pytest.mark.parametrize("kind", FOUR_BITS)
    def test_four_bit_layers_have_the_expected_kernels_and_memory(self, kind):
        model, stock = quantized(kind), models.build()
        actual, shapes, others = logits_and_gemms(model)
        group = int(kind[-2:])
        assert shapes == [(128, 8), (64, 8), (160, 8)] * LAYERS and others == 0
        with options.override(tiers={"linear": "eager"}):
            eager = logits(model)
        assert_as_good_as_eager(actual, eager, logits(model.double()))
        reason = model.__dict__[quantizing.REPORT]["left"]["model.layers.0.mlp.down_proj"]
        assert reason == f"its number of inputs, 80, is not a multiple of the group size {group}"
        for path, layer in quantizing.layers(model):
            weight = stock.get_submodule(path).weight
            scale = layer.quantized.scale[layer.start : layer.start + layer.out_features]
            # half a step, and the rounding error of the bf16 scale at the largest magnitude, which is 7.5 steps
            bound = scale.double().repeat_interleave(group, 1) * (0.5 + 7.5 * 2**-8)
            assert ((layer.weight.double() - weight.double()).abs() <= bound).all()
            data = layer.quantized.data
            assert data.nbytes == data.shape[0] * layer.in_features // 2
            assert layer.quantized.scale.nbytes == data.shape[0] * layer.in_features // group * 2
        assert f"4 bits in groups of {group}" in quantizing.summary(model)
        kernels = {kernel.situation: kernel.kernel for kernel in hf_rocm.explain(model).kernels}
        assert kernels["q_proj + k_proj + v_proj, 128 × 64"] == "dequantize, F.linear"

    def test_a_model_in_four_bits_can_be_copied_restored_and_dequantised(self, stock, tmp_path):
        model = models.prepared()
        hf_rocm.quantize(model, "int4-g32", force=True, keep="cpu")
        before = logits(model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            actual, shapes, _ = logits_and_gemms(copied)
            assert torch.equal(actual, before) and shapes[0] == (128, 8)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, stock.state_dict()[name])
        hf_rocm.restore(model)
        assert_same_results(model, stock)
        again = quantized("int4-g32")
        again.load_state_dict(stock.state_dict())
        assert torch.equal(logits(again), before)
        weights = {path: layer.weight for path, layer in quantizing.layers(again)}
        hf_rocm.dequantize(again)
        assert all(torch.equal(again.get_submodule(path).weight, weight) for path, weight in weights.items())

    @pytest.mark.parametrize(("k", "group"), [(64, 32), (192, 64), (4096, 128), (14336, 128), (96, 32)])
    def test_the_packed_order_has_an_inverse(self, k, group):
        levels = torch.randint(16, (3, k), dtype=torch.int32, generator=torch.Generator().manual_seed(k))
        run = four_bit.run_length(k, group)
        assert k % (8 * run) == 0 and group % run == 0
        assert torch.equal(four_bit.unpacked(four_bit.packed(levels, run), run), levels)

    def test_zeros_and_nan_affect_only_their_group(self):
        weight = torch.randn(4, 128)
        weight[0, :32], weight[1, 40], weight[2, 70] = 0, torch.nan, torch.inf
        words, scale = four_bit.quantize_groups(weight, 32)
        back = four_bit.dequantize_groups(words, scale, torch.float32)
        assert (back[0, :32] == 0).all()
        assert back[1, 32:64].isnan().all() and back[2, 64:96].isnan().all() and back.isnan().sum() == 64
