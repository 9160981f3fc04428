"""quantization_loss: the results agree with their definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import transformers

import hf_rocm
from hf_rocm.errors import LoadError, OptionError
from hf_rocm.tools import quality
from tests.weights import models


def test_a_model_compared_with_itself_has_no_loss():
    model = models.build()
    loss = hf_rocm.quantization_loss(model, models.build(), ids=models.IDS)
    assert (loss.tokens, loss.largest, loss.mean, loss.same_choice, loss.divergence, loss.ratio) == (14, 0, 0, 1, 0, 1)
    with torch.no_grad():
        logits = model(models.IDS).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), models.IDS[:, 1:].flatten()).exp()
    assert loss.perplexity is not None and math.isclose(loss.perplexity[0], expected, rel_tol=1e-5)
    assert math.isclose(loss.size, logits.std(correction=0), rel_tol=1e-5)


def test_8_bit_weights_have_a_small_loss(tmp_path):
    models.build().save_pretrained(tmp_path)
    ids = torch.randint(0, 96, (1100,), generator=torch.Generator().manual_seed(0))
    losses = {}
    for kind in ("fp8", "int8"):
        quantized = hf_rocm.quantize(models.build(), kind, force=True)
        losses[kind] = hf_rocm.quantization_loss(quantized, tmp_path, ids=ids[:60])
        assert 0 < losses[kind].mean < losses[kind].largest < losses[kind].size and losses[kind].ratio != 1
    assert 0 < losses["int8"].divergence < losses["fp8"].divergence < 0.1
    # int8 has 255 levels for the range of a row, and fp8 has a mantissa of 3 bits for every number
    assert losses["int8"].mean < losses["fp8"].mean
    assert [len(chunk[0]) for chunk in quality.chunks(ids)] == [512, 512, 76]
    assert f"× {losses['fp8'].ratio:.4f}" in str(losses["fp8"]) and losses["fp8"].to_dict()["tokens"] == 60


def test_a_known_difference_is_measured():
    first, second = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    second[0, 1, 2] = 2.0
    ids = torch.tensor([[0, 2, 2]])
    loss = quality.compare([second], [first], [ids], predicts=True)
    assert (loss.largest, loss.mean, loss.size) == (2.0, 2 / 12, 0.0)
    assert math.isclose(loss.same_choice, 2 / 3)
    # two of the three positions agree; at the other one, the probabilities of `first` are equal, and one probability of
    # `second` is e² times each of the others
    divergence = math.log((3 + math.e**2) / 4) - 2 / 4
    assert math.isclose(loss.divergence, divergence / 3, rel_tol=1e-6)
    impossible = torch.tensor([[[0.0, -math.inf, 1.0, 0.0]]])
    assert quality.compare([impossible], [impossible], [ids[:, :1]], predicts=False).divergence == 0
    uneven = (2 * math.log(4) + math.log((3 + math.e**2) / math.e**2) - math.log(4)) / 2
    assert loss.perplexity is not None and math.isclose(loss.perplexity[1], 4.0, rel_tol=1e-6)
    assert math.isclose(loss.perplexity[0], math.exp(uneven), rel_tol=1e-6)
    undefined = quality.compare([second * torch.nan], [first], [ids], predicts=False)
    assert math.isnan(undefined.largest) and math.isnan(undefined.divergence)
    assert quality.compare([second], [first], [ids], predicts=False).perplexity is None


def test_models_that_cannot_be_compared_are_refused(tmp_path):
    model = models.build()
    with pytest.raises(LoadError, match="there is no tokenizer"):
        hf_rocm.quantization_loss(model, models.build(), text="a text")
    with pytest.raises(OptionError, match="has no logits to compare"):
        hf_rocm.quantization_loss(model.model, model.model, ids=models.IDS)
    with pytest.raises(OptionError, match="no tokens to read"):
        hf_rocm.quantization_loss(model, model, ids=torch.empty(0, dtype=torch.long))


def test_the_default_text_is_part_of_python():
    text = quality.python_text()
    assert len(text) > 20_000 and text == quality.python_text()

    def tokenizer(words):
        return {"input_ids": list(words.encode())}

    assert quality.read(tokenizer, None).shape == (2048,)
    assert quality.read(tokenizer, "ab", tokens=9).tolist() == [97, 98]


@pytest.mark.parametrize("ids", ["12", [1, 2], torch.zeros(3)])
def test_tokens_are_integers(ids):
    with pytest.raises(OptionError, match="ids must be a tensor of integer tokens"):
        hf_rocm.quantization_loss(models.build(), models.build(), ids=ids)


def test_the_reference_is_a_model_or_its_name():
    with pytest.raises(OptionError, match="reference must be a model"):
        hf_rocm.quantization_loss(models.build(), None, ids=models.IDS)


@pytest.mark.parametrize("model_type", ["bert", "gpt_neox", "t5"])
def test_an_empty_tokenizer_counts_as_missing(model_type, tmp_path):
    """transformers 5 creates some tokenizers without any file."""
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="there is no tokenizer"):
        quality.tokenizer_of(tmp_path)
