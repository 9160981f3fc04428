"""Checkpoints of named shapes for servers: every token is a separate word, and unusable shapes are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers.decoders import DecodeStream

from hf_rocm.errors import OptionError
from hf_rocm.tools.bench.serving import checkpoint
from hf_rocm.tools.bench.serving.traffic import Load, plan

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    checkpoint.write(path, "small", layers=1, **CPU)
    return path


def test_transformers_loads_the_model_and_the_tokenizer(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 2048
    assert set(tokenizer("aaab aaac")) == {"input_ids", "attention_mask"}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "aaab aaac"}], tokenize=False)
    assert tokenizer(text)["input_ids"] == tokenizer("aaab aaac")["input_ids"]


def test_every_token_is_a_separate_word_in_streamed_answers_too(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer._tokenizer, token) for token in range(1, 2048)]
    assert None not in pieces and len({piece.strip() for piece in pieces}) == 2047
    assert tokenizer("".join(pieces))["input_ids"] == list(range(1, 2048))


def test_prompts_have_the_drawn_lengths(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    requests = plan(Load(2, None, 5, 7, 7, 4), tokenizer)
    assert {len(tokenizer(request.prompt)["input_ids"]) for request in requests} == {7}


def test_the_largest_vocabulary_of_the_known_shapes_has_enough_words():
    assert len(checkpoint.tokenizer(262208)) == 262208


def test_an_encoder_is_refused(tmp_path):
    with pytest.raises(OptionError, match="generates no text"):
        checkpoint.write(tmp_path, "bert-base", **CPU)


def test_weights_that_do_not_fit_on_the_disk_are_refused_before_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(
        checkpoint.dummy_checkpoint, "fill_file", lambda *_, **__: pytest.fail("the weights were written")
    )
    with pytest.raises(OptionError, match="don't fit on the disk"):
        checkpoint.write(tmp_path, "small", layers=1, **CPU)
