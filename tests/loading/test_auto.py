"""auto_prepare: models loaded by transformers are prepared. Text encoders of diffusers stay stock by default."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

import hf_rocm
from hf_rocm.errors import OptionError
from hf_rocm.loading import auto
from hf_rocm.loading.prepare import REPORT
from hf_rocm.overlay import bind
from tests.parity import models


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.save_checkpoint("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return models.save_checkpoint("bert", tmp_path_factory.mktemp("bert"), torch.float32)


@pytest.fixture(autouse=True)
def undone():
    stock = PreTrainedModel.__dict__["from_pretrained"]
    yield
    auto.auto_prepare(False)
    assert PreTrainedModel.__dict__["from_pretrained"] is stock


@pytest.fixture
def prepares(monkeypatch):
    """Record the class of every model that is prepared."""
    from hf_rocm.loading import prepare as preparing

    calls, prepare = [], preparing.prepare

    def counted(model, **arguments):
        calls.append(type(model).__name__)
        return prepare(model, **arguments)

    monkeypatch.setattr(preparing, "prepare", counted)
    return calls


def is_prepared(model):
    return REPORT in model.__dict__


def test_every_way_of_loading_prepares_the_model_once(llama, prepares):
    docstring = str(PreTrainedModel.from_pretrained.__doc__)
    assert hf_rocm.auto_prepare(force=True) is True
    assert str(PreTrainedModel.from_pretrained.__doc__) == docstring
    for load in (
        transformers.LlamaForCausalLM.from_pretrained,
        transformers.AutoModelForCausalLM.from_pretrained,
        transformers.AutoModel.from_pretrained,
    ):
        model = load(llama)
        assert is_prepared(model) and model.__dict__[REPORT]["fused"]
    assert len(prepares) == 3
    model, info = transformers.AutoModel.from_pretrained(llama, output_loading_info=True)
    assert is_prepared(model) and list(info["missing_keys"]) == []


# In 5.0, the tokenizer emits this warning.
@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")
def test_pipelines_are_prepared(bert, tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    tokenizer = transformers.BertTokenizer(str(vocabulary))
    hf_rocm.auto_prepare(force=True)
    pipeline = transformers.pipeline("fill-mask", model=str(bert), tokenizer=tokenizer)
    assert is_prepared(pipeline.model)
    assert bind.mode_of(pipeline.model.bert.encoder.layer[0].attention.self) == bind.ON


def test_auto_prepare_is_undone_completely(llama):
    stock = PreTrainedModel.__dict__["from_pretrained"]
    for _ in range(2):
        hf_rocm.auto_prepare(force=True)
        hf_rocm.auto_prepare(force=True)
        assert PreTrainedModel.__dict__["from_pretrained"] is not stock
        assert hf_rocm.auto_prepare(False) is False
        assert PreTrainedModel.__dict__["from_pretrained"] is stock
    assert hf_rocm.auto_prepare(False) is False
    assert not is_prepared(transformers.AutoModel.from_pretrained(llama))


def test_hf_rocms_loader_prepares_once_and_keeps_its_arguments(llama, prepares, monkeypatch):
    from hf_rocm.loading import pretrained

    monkeypatch.setattr(pretrained, "prepare", lambda model, **arguments: (prepares.append("loader"), model)[1])
    hf_rocm.auto_prepare(force=True)
    hf_rocm.from_pretrained(llama)
    assert prepares == ["loader"]
    monkeypatch.undo()
    assert not is_prepared(hf_rocm.from_pretrained(llama, force=False))


def test_without_rocm_nothing_happens_and_one_line_is_logged(caplog, monkeypatch):
    stock = PreTrainedModel.__dict__["from_pretrained"]
    monkeypatch.delenv("HF_ROCM_FORCE", raising=False)
    monkeypatch.setattr(auto, "_warned", set())
    monkeypatch.setattr("hf_rocm.device.is_rocm", lambda: False)
    with caplog.at_level(logging.WARNING, "hf_rocm"):
        assert [hf_rocm.auto_prepare() for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1 and "stay stock" in caplog.text
    assert hf_rocm.auto_prepare(force=False) is False
    assert PreTrainedModel.__dict__["from_pretrained"] is stock


def test_composite_models_are_prepared_once_as_a_whole(bert, prepares, tmp_path, monkeypatch):
    encoder_decoder = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(str(bert), str(bert))
    encoder_decoder.save_pretrained(tmp_path / "both")

    stock, inner = PreTrainedModel.__dict__["from_pretrained"], []

    def nested(cls, *args, **kwargs):
        """Simulate a model whose `from_pretrained` loads another model."""
        if cls is transformers.BertForMaskedLM:
            inner.append(transformers.BertModel.from_pretrained(bert))
        return stock.__func__(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(nested))
    hf_rocm.auto_prepare(force=True)
    model = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "both")
    assert prepares == ["EncoderDecoderModel"] and is_prepared(model) and not is_prepared(model.encoder)
    del prepares[:]
    model = transformers.BertForMaskedLM.from_pretrained(bert)
    assert prepares == ["BertForMaskedLM"] and is_prepared(model) and not is_prepared(inner[0])
    hf_rocm.auto_prepare(False)


def test_after_a_failed_load_the_next_model_is_prepared(llama, tmp_path):
    hf_rocm.auto_prepare(force=True)
    with pytest.raises((OSError, ValueError)):
        transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(OSError):
        transformers.LlamaModel.from_pretrained(tmp_path)
    assert is_prepared(transformers.LlamaModel.from_pretrained(llama))


PIPELINE = '''
"""A stand-in for diffusers: its pipelines load their components through a helper, as in the real library."""
import importlib


def load_sub_model(library_name, class_name, folder):
    class_obj = getattr(importlib.import_module(library_name), class_name)
    load_method = getattr(class_obj, "from_pretrained")
    return load_method(folder)


class DiffusionPipeline:
    @classmethod
    def from_pretrained(cls, folder):
        self = cls()
        self.text_encoder = load_sub_model("transformers", "BertModel", folder)
        return self
'''


@pytest.fixture
def diffusers(tmp_path, monkeypatch):
    package = tmp_path / "diffusers"
    (package / "pipelines").mkdir(parents=True)
    (package / "__init__.py").write_text("from diffusers.pipelines.pipeline_utils import DiffusionPipeline\n")
    (package / "pipelines" / "__init__.py").write_text("")
    (package / "pipelines" / "pipeline_utils.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
        monkeypatch.delitem(sys.modules, name)
    import diffusers

    yield diffusers
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
        del sys.modules[name]


def test_text_encoders_of_a_diffusion_pipeline_stay_stock_by_default(diffusers, bert):
    hf_rocm.auto_prepare(force=True)
    assert not is_prepared(diffusers.DiffusionPipeline.from_pretrained(bert).text_encoder)
    assert is_prepared(transformers.BertModel.from_pretrained(bert))
    hf_rocm.auto_prepare(also=["diffusers"], force=True)
    assert is_prepared(diffusers.DiffusionPipeline.from_pretrained(bert).text_encoder)


def test_another_librarys_wrapper_is_kept_and_reported(llama, caplog):
    stock = PreTrainedModel.__dict__["from_pretrained"]
    hf_rocm.auto_prepare(force=True)
    wrapper = PreTrainedModel.__dict__["from_pretrained"].__func__
    PreTrainedModel.from_pretrained = classmethod(lambda cls, *args, **kwargs: wrapper(cls, *args, **kwargs))
    try:
        with caplog.at_level(logging.WARNING, "hf_rocm"):
            hf_rocm.auto_prepare(False)
        assert "replaced by other code" in caplog.text
        assert not is_prepared(transformers.LlamaModel.from_pretrained(llama))
    finally:
        PreTrainedModel.from_pretrained = stock


@pytest.mark.parametrize(("value", "prepared"), [("1", True), ("yes", False)])
def test_an_installed_block_enables_auto_prepare_if_the_environment_requests_it(llama, value, prepared):
    """A child process calls `overlay.wanted`, as an installed block at the end of a modeling file does."""
    program = textwrap.dedent(
        f"""
        import sys, warnings
        warnings.simplefilter("ignore")
        import transformers.models.llama.modeling_llama as modeling
        from hf_rocm import overlay
        before = "hf_rocm.weights" in sys.modules
        overlay.wanted("transformers.models.llama.modeling_llama")
        assert not before and "hf_rocm.weights" not in sys.modules and "hf_rocm.ops" not in sys.modules
        import transformers
        model = transformers.AutoModelForCausalLM.from_pretrained({str(llama)!r})
        print("_hf_rocm_report" in model.__dict__)
        """
    )
    environment = {**os.environ, "HF_ROCM_AUTO": value, "HF_ROCM_FORCE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split()[-1] == str(prepared)


@pytest.mark.parametrize("also", ["diffusers", 3, None])
def test_also_must_be_a_list_of_packages(also):
    with pytest.raises(OptionError, match=r"also=.* is not valid"):
        hf_rocm.auto_prepare(also=also)
