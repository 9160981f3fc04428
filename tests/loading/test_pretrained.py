"""from_pretrained: the class, the dtype, the message without ROCm, and clear errors."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import ops
from hf_rocm.errors import LoadError, OptionError
from hf_rocm.loading.prepare import REPORT
from hf_rocm.overlay import bind
from tests.parity import models


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.save_checkpoint("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return models.save_checkpoint("bert", tmp_path_factory.mktemp("bert"), torch.float32)


def change_config(folder, target, **changes):
    """Copy a checkpoint with changed config entries. The value None removes an entry."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.update({key: value})
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_the_first_architecture_is_the_class(llama, bert):
    assert type(hf_rocm.from_pretrained(llama, force=True)) is transformers.LlamaForCausalLM
    assert type(hf_rocm.from_pretrained(str(bert), force=True)) is transformers.BertForMaskedLM


def test_without_architectures_causal_lm_comes_first_and_auto_model_last(llama, tmp_path):
    nameless = change_config(llama, tmp_path / "llama", architectures=None)
    assert type(hf_rocm.from_pretrained(nameless, force=True)) is transformers.LlamaForCausalLM
    clip = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.CLIPTextModel(clip).save_pretrained(tmp_path / "clip")
    nameless = change_config(tmp_path / "clip", tmp_path / "nameless", architectures=None)
    assert type(hf_rocm.from_pretrained(nameless, force=True)) is transformers.CLIPTextModel


HOSTILE = [
    [None], {}, {"0": "LlamaModel"}, "LlamaModel", [["LlamaModel"]], [1], [""], ["__name__"], ["no such class"], ["os"],
    ["pipeline"], ["Trainer"], ["logging"], ["AutoTokenizer"], ["AutoModel"], ["RagRetriever"], ["LlamaConfig"],
    ["PreTrainedModel"], ["BertForMaskedLM"], ["GenerationMixin"], ["utils"], ["TFLlamaModel"], ["LlamaTokenizerFast"],
]  # fmt: skip


@pytest.mark.parametrize("named", HOSTILE, ids=repr)
def test_an_unusable_architecture_is_ignored(named, llama, tmp_path):
    checkpoint = change_config(llama, tmp_path / "llama", architectures=named)
    try:
        stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    except Exception as error:  # noqa: BLE001 (whatever stock raises)
        with pytest.raises((type(error), LoadError)):
            hf_rocm.from_pretrained(checkpoint, force=True)
        return
    model = hf_rocm.from_pretrained(checkpoint, force=True)
    assert type(model) is type(stock) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("auto_class", ["AutoModel", transformers.AutoModel, transformers.LlamaModel])
def test_auto_class_selects_the_class(llama, auto_class):
    model = hf_rocm.from_pretrained(llama, auto_class=auto_class, force=True)
    assert type(model) is transformers.LlamaModel
    assert bind.mode_of(model.layers[0].self_attn) == bind.ON


def test_the_default_dtype_is_that_of_the_checkpoint(llama):
    assert hf_rocm.from_pretrained(llama, force=True).dtype == torch.bfloat16
    assert hf_rocm.from_pretrained(llama, force=True, dtype=torch.float32).dtype == torch.float32
    assert hf_rocm.from_pretrained(llama, force=True, dtype="float16").dtype == torch.float16


def test_arguments_of_transformers_pass_through(llama):
    model, info = hf_rocm.from_pretrained(llama, force=True, output_loading_info=True, use_cache=False)
    assert list(info["missing_keys"]) == [] and model.config.use_cache is False
    assert bind.mode_of(model.model.layers[0].mlp) == bind.ON


def test_without_rocm_the_model_is_stock_and_one_line_is_logged(llama, caplog):
    with caplog.at_level(logging.INFO, logger="hf_rocm"):
        model = hf_rocm.from_pretrained(llama)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stays stock" in caplog.records[0].message and "ROCm" in caplog.records[0].message
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_hf_rocm")]
    with torch.inference_mode(), ops.recording() as routes:
        model(input_ids=models.tokens(1, 4))
    assert routes == []
    assert "stock, because this PyTorch is not a ROCm build" in hf_rocm.explain(model).details()


def test_force_false_overrides_the_environment(llama, monkeypatch):
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    model = hf_rocm.from_pretrained(llama, force=False)
    assert bind.mode_of(model.model.layers[0].self_attn) == bind.OFF
    assert bind.mode_of(hf_rocm.from_pretrained(llama).model.layers[0].self_attn) == bind.ON


def test_a_model_without_an_overlay_stays_stock_and_explain_gives_the_reason(tmp_path):
    config = transformers.OpenAIGPTConfig(vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
    model = hf_rocm.from_pretrained(tmp_path, force=True)
    stock = transformers.OpenAIGPTLMHeadModel.from_pretrained(tmp_path)
    ids = models.tokens(1, 5) % 99
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)
    explanation = hf_rocm.explain(model)
    assert explanation.state.startswith("stock, because none of its layers has an overlay")
    assert explanation.without_overlay == {"openai": "hf_rocm has no overlay for this model"}


def test_a_missing_folder_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(LoadError) as caught:
        hf_rocm.from_pretrained(tmp_path / "nothing", force=True, local_files_only=True)
    assert str(tmp_path / "nothing") in str(caught.value) and "hint:" in str(caught.value)
    assert isinstance(caught.value, OSError) and caught.value.__cause__ is not None
    assert caught.value.facts == {"found": "the folder does not exist"}


def test_the_error_for_a_missing_hub_repository_includes_transformers_error():
    with pytest.raises(LoadError) as caught:
        hf_rocm.from_pretrained("somebody/nothing", force=True, local_files_only=True)
    assert "transformers error" in caught.value.facts


def test_missing_weights_are_an_error(llama, tmp_path):
    empty = change_config(llama, tmp_path / "empty")
    for file in empty.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(LoadError, match="no model could be loaded") as caught:
        hf_rocm.from_pretrained(empty, force=True)
    assert "safetensors" in str(caught.value)


def _cut_short(file):
    file.write_bytes(file.read_bytes()[:1000])


def _no_archive(file):
    file.unlink()
    (file.parent / "pytorch_model.bin").write_bytes(b"PK\3\4 and no more")


def _empty_archive(file):
    file.unlink()
    (file.parent / "pytorch_model.bin").touch()


@pytest.mark.parametrize("damage", [_cut_short, _no_archive, _empty_archive])
def test_damaged_weights_are_an_error(damage, llama, tmp_path):
    checkpoint = change_config(llama, tmp_path / "damaged")
    damage(checkpoint / "model.safetensors")
    # the second message is for an OSError, which transformers raises up to 4.57
    with pytest.raises(LoadError, match=r"can't be loaded|could be loaded") as caught:
        hf_rocm.from_pretrained(checkpoint, force=True)
    assert caught.value.hint and caught.value.__cause__ is not None


def test_weights_of_another_shape_are_an_error(llama, tmp_path):
    checkpoint = change_config(llama, tmp_path / "other", intermediate_size=40)
    with pytest.raises(LoadError, match=r"the weights of .* can't be loaded"):
        hf_rocm.from_pretrained(checkpoint, force=True)


def test_another_runtime_error_is_not_changed(llama, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        hf_rocm.from_pretrained(llama, force=True)


def test_an_option_that_transformers_does_not_accept_is_an_error(llama):
    with pytest.raises(OptionError) as caught:
        hf_rocm.from_pretrained(llama, force=True, flavour="sweet")
    assert "flavour" in str(caught.value) and "auto_class, force, preshuffle" in str(caught.value)


@pytest.mark.parametrize("auto_class", [3, object()])
def test_an_object_that_loads_nothing_is_an_error(llama, auto_class):
    with pytest.raises(OptionError, match="is not a class that loads models"):
        hf_rocm.from_pretrained(llama, auto_class=auto_class)


def test_a_class_that_transformers_does_not_have_is_an_error(llama):
    with pytest.raises(OptionError, match="AutoModelForEverything"):
        hf_rocm.from_pretrained(llama, auto_class="AutoModelForEverything")


def test_prepare_accepts_only_models(llama):
    with pytest.raises(OptionError, match="takes a model"):
        hf_rocm.prepare("llama", force=True)


@pytest.mark.parametrize("name", ["force", "graphs"])
def test_switches_are_true_false_or_none(llama, name):
    for wrong in ("yes", 1):
        with pytest.raises(OptionError, match=f"{name}={wrong!r} is not valid"):
            hf_rocm.from_pretrained(llama, **{name: wrong})


@pytest.mark.parametrize(
    "call",
    [
        hf_rocm.prepare,
        hf_rocm.verify,
        hf_rocm.compile,
        hf_rocm.route_linear,
        lambda model, force: hf_rocm.quantize(model, "int8", force=force),
        lambda model, force: hf_rocm.auto_prepare(force=force),
        lambda model, force: hf_rocm.routed_linear(force=force).__enter__(),
    ],
)
def test_every_function_checks_force(call):
    with pytest.raises(OptionError, match="force='yes' is not valid"):
        call(torch.nn.Linear(2, 2).eval(), force="yes")


def test_hf_rocms_arguments_are_not_passed_to_transformers(llama):
    model = hf_rocm.from_pretrained(llama, force=True, preshuffle="off", budget="25%", linear_backend="auto")
    report = model.__dict__[REPORT]
    assert report["preshuffle"]["mode"] == "off" and report["preshuffle"]["budget"] > 0
    assert "lm_head" in report["routed"]["layers"]
    hf_rocm.restore(model)
