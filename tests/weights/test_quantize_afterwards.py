"""Using a quantised model: copies, dtypes, loading, saving, hooks, compilation and generation."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.layers.grouped_linear import project
from hf_rocm.weights import quantize as quantizing
from hf_rocm.weights.quantized import group_of
from tests import eight_bit
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models
from tests.weights.models import IDS, LAYERS, logits
from tests.weights.test_quantize import SHAPES, every_kind, logits_and_gemms, quantized


@pytest.fixture(autouse=True, scope="module")
def checked():
    eight_bit.check_all()


# Sizes that are multiples of all group sizes.
WIDE = {"hidden_size": 128, "intermediate_size": 256}


class TestAfterwards:
    """Changes to a quantised model, and its use."""

    def assert_same_gemms(self, model, expected):
        actual, shapes, others = logits_and_gemms(model)
        assert torch.equal(actual, expected) and shapes == SHAPES * LAYERS and others == 0

    def test_copies_and_pickles_stay_quantised(self):
        model = quantized("fp8")
        expected = logits(model)
        self.assert_same_gemms(copy.deepcopy(model), expected)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        self.assert_same_gemms(torch.load(file, weights_only=False), expected)
        twin = pickle.loads(pickle.dumps(model.model.layers[0].self_attn))
        assert group_of(twin) is not None and group_of(twin) is twin.k_proj.quantized

    @every_kind
    def test_casting_keeps_the_8_bit_weights(self, kind):
        model = quantized(kind)
        before = {path: layer.quantized.data.clone() for path, layer in quantizing.layers(model)}
        model.bfloat16()
        for path, layer in quantizing.layers(model):
            assert torch.equal(layer.quantized.data.double(), before[path].double())
            assert layer.quantized.scale.dtype == torch.float32 and layer.weight.dtype == torch.bfloat16
        output, shapes, _ = logits_and_gemms(model)
        assert output.dtype == torch.bfloat16 and shapes == SHAPES * LAYERS
        assert model.to("meta").model.layers[0].mlp.up_proj.quantized.data.is_meta

    def test_quantised_layers_run_under_autocast(self):
        model = quantized()
        with torch.autocast("cpu", torch.bfloat16):
            output, shapes, _ = logits_and_gemms(model)
        assert shapes == SHAPES * LAYERS and output.dtype == torch.bfloat16 and torch.isfinite(output).all()

    @pytest.mark.parametrize("kept", [None, "cpu"])
    def test_loaded_weights_take_effect_in_the_next_call(self, kept):
        model, other = quantized(keep=kept), models.build()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5).add_(0.01)
        names = set(model.state_dict())
        assert names == set(other.state_dict())
        model.load_state_dict(other.state_dict(), assign=kept is None)
        twin = hf_rocm.quantize(hf_rocm.prepare(other, force=True), "int8", force=True)
        self.assert_same_gemms(model, logits(twin))
        if kept:
            hf_rocm.restore(model)
            assert torch.equal(
                model.model.layers[0].mlp.up_proj.weight * 1, model.state_dict()["model.layers.0.mlp.up_proj.weight"]
            )

    def test_loading_reports_errors(self):
        model = quantized()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        name = "model.layers.0.mlp.up_proj.weight"
        with pytest.raises(RuntimeError, match=r"Missing key.*up_proj\.weight"):
            model.load_state_dict({key: value for key, value in state.items() if key != name})
        with pytest.raises(RuntimeError, match=r"Unexpected key.*up_proj\.odd"):
            model.load_state_dict({**state, "model.layers.0.mlp.up_proj.odd": torch.zeros(1)})
        with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.mlp\.up_proj\.weight"):
            model.load_state_dict({**state, name: torch.zeros(3, 3)})
        missing, unexpected = model.load_state_dict({}, strict=False)
        assert name in missing and not unexpected

    def test_a_saved_model_is_an_ordinary_checkpoint(self, tmp_path, caplog):
        model = quantized("fp8")
        model.save_pretrained(tmp_path)
        assert "contains its rounded weights" in caplog.text and caplog.text.count("rounded weights") == 1
        loaded = LlamaForCausalLM.from_pretrained(tmp_path)
        weights = {path: layer.weight for path, layer in quantizing.layers(model)}
        for name, parameter in loaded.named_parameters():
            owner = name.rpartition(".")[0]
            expected = weights[owner] if owner in weights else model.get_parameter(name)
            assert torch.equal(parameter, expected) and parameter.dtype == torch.float32
        # Saving did not change the model.
        self.assert_same_gemms(model, logits(model))

    def test_layers_with_biases_are_quantised(self):
        model = models.build(attention_bias=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        expected = logits(models.build(attention_bias=True).double())
        stock = copy.deepcopy(model)
        hf_rocm.quantize(hf_rocm.prepare(model, force=True), "int8", force=True)
        actual, shapes, _ = logits_and_gemms(model)
        assert shapes == SHAPES * LAYERS and not torch.equal(actual.double(), expected)
        with options.override(tiers={"linear": "eager"}):
            eager = logits(model)
        assert_as_good_as_eager(actual, eager, logits(stock.double()))
        assert torch.equal(model.model.layers[0].self_attn.v_proj.bias, stock.model.layers[0].self_attn.v_proj.bias)

    def test_a_hooked_or_replaced_layer_is_called(self):
        model = quantized()
        expected = logits(model)
        seen = []
        attention = model.model.layers[0].self_attn
        handle = attention.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
        actual, shapes, _ = logits_and_gemms(model)
        assert torch.equal(actual, expected) and len(seen) == 1 and len(shapes) == len(SHAPES) * LAYERS + 2
        handle.remove()
        self.assert_same_gemms(model, expected)
        attention.k_proj = nn.Linear(64, 32, bias=False)
        assert group_of(attention) is None and torch.isfinite(logits(model)).all()

    def test_quantised_blocks_compile_into_one_graph(self):
        """The test compiles only blocks, because the mask code of transformers 4.x can't be compiled into one graph."""
        model = quantized("fp8")
        mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
        x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))

        def run(x):
            return mlp(x), *project(attention, x), attention.o_proj(x)

        with torch.no_grad(), ops.recording() as routes:
            expected = run(x)
            actual = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
        shapes = [route.shapes[1] for route in routes if route.operation == "quantized_linear"]
        assert shapes == [(160, 64), (64, 80), (128, 64), (64, 64)]
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)

    def test_a_quantised_model_generates(self):
        model = quantized("int8")
        output = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        again = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
        assert output.shape == (2, 11) and torch.equal(output, again)

    def test_preparing_a_quantised_model_again_changes_nothing(self):
        model = quantized()
        expected = logits(model)
        hf_rocm.prepare(model, force=True)
        self.assert_same_gemms(model, expected)

    @pytest.mark.parametrize(
        "change",
        [
            lambda layer: _exchange(layer.self_attn, "k_proj", "v_proj"),
            lambda layer: setattr(layer.self_attn, "v_proj", layer.self_attn.k_proj),
            lambda layer: _exchange(layer.mlp, "gate_proj", "up_proj"),
        ],
        ids=["k and v exchanged", "k as v", "gate and up exchanged"],
    )
    def test_layers_of_a_group_that_change_places_are_followed(self, change):
        model = quantized("int4", **WIDE)
        expected = with_dequantised_weights(model)
        before = logits(model)
        for each in (model, expected):
            change(each.model.layers[0])
        torch.testing.assert_close(logits(model), logits(expected))
        assert not torch.allclose(logits(model), before, atol=1e-2)

    @pytest.mark.parametrize("kind", ["int4", "int4-g32", "int8", "fp8", "mxfp4"])
    def test_loading_its_own_weights_changes_nothing(self, kind):
        model = quantized(kind, **WIDE)
        before = {name: tensor.clone() for name, tensor in model.named_buffers()}
        assert model.load_state_dict(model.state_dict()) == ([], [])
        for name, tensor in model.named_buffers():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name

    @every_kind
    def test_shared_memory_contains_the_encoded_weights(self, kind):
        model = quantized(kind)
        before = logits(model)
        model.share_memory()
        assert all(tensor.is_shared() for tensor in (*model.parameters(), *model.buffers()))
        assert torch.equal(logits(model), before)

    def test_no_tensor_of_a_state_dict_is_a_view_of_another(self):
        state = quantized("int8", attention_bias=True).state_dict()
        bias = state["model.layers.0.self_attn.k_proj.bias"]
        assert bias.untyped_storage().nbytes() == bias.nbytes


class TestUndone:
    """What `restore` and `dequantize` keep of the changes to a quantised model."""

    UNDO = pytest.mark.parametrize("undo", [hf_rocm.restore, hf_rocm.dequantize], ids=["restore", "dequantize"])

    @UNDO
    @pytest.mark.parametrize("training", [True, False])
    def test_layers_have_the_models_mode(self, undo, training):
        model = undo(quantized(keep="cpu").train(training))
        assert all(module.training is training for module in model.modules())

    @UNDO
    def test_hooks_stay_and_can_be_removed(self, undo):
        model = quantized(keep="cpu")
        layer, calls = model.model.layers[0].mlp.down_proj, []
        after = layer.register_forward_hook(lambda *_: calls.append("after"))
        ahead = layer.register_forward_pre_hook(lambda *_, **__: calls.append("ahead"), with_kwargs=True)
        undo(model)
        logits(model)
        assert calls == ["ahead", "after"]
        after.remove()
        ahead.remove()
        logits(model)
        assert calls == ["ahead", "after"]
        layer = model.model.layers[0].mlp.down_proj
        assert not layer._forward_hooks and not layer._forward_pre_hooks and not layer._forward_pre_hooks_with_kwargs

    @UNDO
    def test_a_forward_that_was_set_is_reported(self, undo, caplog):
        model = quantized(keep="cpu")
        layer = model.model.layers[0].mlp.down_proj
        layer.forward = lambda x: x
        undo(model)
        assert "the forward that was set on model.layers.0.mlp.down_proj is gone" in caplog.text

    @UNDO
    def test_a_layer_in_several_places_stays_one_layer(self, undo):
        model = quantized(keep="cpu")
        attention = model.model.layers[0].self_attn
        attention.v_proj = attention.k_proj
        handle = attention.k_proj.register_forward_hook(lambda *_: None)
        undo(model)
        assert attention.v_proj is attention.k_proj and len(attention.k_proj._forward_hooks) == 1
        handle.remove()

    @UNDO
    def test_parts_that_were_quantised_alone_are_unfrozen(self, undo):
        model = models.build()
        hf_rocm.quantize(hf_rocm.prepare(model, force=True).model, "int8", keep="cpu", force=True)
        undo(model)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert not any(quantizing.REPORT in module.__dict__ for module in model.modules())

    def test_a_part_that_was_dequantised_alone_is_no_longer_described(self):
        model = quantized()
        hf_rocm.dequantize(model.model)
        assert quantizing.summary(model) is None

    @UNDO
    def test_parameters_created_in_inference_mode_are_unfrozen(self, undo):
        with torch.inference_mode():
            model = models.build()
        hf_rocm.quantize(hf_rocm.prepare(model, force=True), "int8", keep="cpu", force=True)
        undo(model)
        assert all(parameter.requires_grad for parameter in model.parameters())


def _exchange(module, first, second):
    one, other = getattr(module, first), getattr(module, second)
    setattr(module, first, other)
    setattr(module, second, one)


def with_dequantised_weights(model):
    """A stock model with the same weights."""
    stock = LlamaForCausalLM(model.config).eval()
    stock.load_state_dict(model.state_dict())
    return stock
