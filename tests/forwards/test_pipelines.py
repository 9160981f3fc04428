"""transformers' pipelines with recorded forwards return stock's results for inputs of mixed lengths."""

from __future__ import annotations

import copy
import random

import numpy
import PIL.Image
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hf_rocm
from tests.forwards.conftest import counted
from tests.forwards.families import make

WORDS = [f"w{number}" for number in range(57)]


@pytest.fixture
def tokenizer():
    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    words = {word: index for index, word in enumerate([*special, *WORDS])}
    built = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, model_max_length=60, model_input_names=inputs, **names
    )


def texts(count=24):
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(1, 50))) for _ in range(count)]


def pipelines(task, stock, **parts):
    """Return [a pipeline with a prepared copy of the model, a pipeline with the stock model]."""
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    return [transformers.pipeline(task, model=model, device="cpu", **parts) for model in (prepared, stock)]


def numbers(result):
    """All keys and values of a nested result in one list, in order."""
    if isinstance(result, dict):
        return [item for key, value in result.items() for item in (key, *numbers(value))]
    if isinstance(result, (list, tuple)):
        return [item for value in result for item in numbers(value)]
    return [result.item() if isinstance(result, numpy.generic) else result]


def same(one, other):
    ones, others = numbers(one), numbers(other)
    assert len(ones) == len(others) and ones
    return all(
        one == (pytest.approx(other, rel=1e-4, abs=1e-5) if isinstance(other, float) else other)
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("task", "family", "name"),
    [
        ("text-classification", "classifier", None),
        ("text-classification", "distilbert", "DistilBertForSequenceClassification"),
        ("token-classification", "bert", "BertForTokenClassification"),
        ("feature-extraction", "roberta", None),
        ("feature-extraction", "modernbert", None),
    ],
)
def test_pipelines_of_texts_of_mixed_lengths_equal_stock(task, family, name, batch, recorded_on_cpu, tokenizer):
    window = {"local_attention": 128} if family == "modernbert" else {}
    prepared, stock = pipelines(task, make(family, task=name, **window), tokenizer=tokenizer)
    arguments = texts()
    assert same(prepared(arguments, batch_size=batch), stock(arguments, batch_size=batch))
    if batch == 1:
        assert all(same(prepared(text), stock(text)) for text in arguments)
    recorded, replayed = counted(prepared.model)
    assert recorded in (1, 2) and replayed > (20 if batch == 1 else 0)


def test_pipelines_of_images_of_mixed_sizes_equal_stock(recorded_on_cpu):
    sizes = ((24, 24), (40, 30), (17, 50))
    generator = numpy.random.default_rng(0)
    images = [
        PIL.Image.fromarray(generator.integers(0, 256, (*sizes[number % 3], 3), dtype="uint8")) for number in range(12)
    ]
    # In releases with ViTImageProcessorPil, ViTImageProcessor needs torchvision.
    processor_class = getattr(transformers, "ViTImageProcessorPil", None)
    processor = (processor_class or transformers.ViTImageProcessor)(size={"height": 24, "width": 24})
    prepared, stock = pipelines("image-classification", make("vit"), image_processor=processor)
    assert same(prepared(images), stock(images))
    assert counted(prepared.model)[0] == 1 and counted(prepared.model)[1] > 6


def test_moves_that_change_nothing_keep_the_recordings(recorded_on_cpu, tokenizer):
    """In every call to `encode`, sentence-transformers moves its model to the device that it is already on."""
    model = hf_rocm.prepare(make("bert"), force=True)
    run = transformers.pipeline("feature-extraction", model=model, device="cpu", tokenizer=tokenizer)
    recorded = []
    for _ in range(3):
        model.to("cpu")
        run(texts())
        recorded.append(counted(model)[0])
    assert recorded[1] == recorded[2] and counted(model)[1] > 24
