"""Encoder-decoder models: the decoder's steps are recorded, and the tokens equal stock's."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, EncoderDecoderCache

import hf_rocm
from hf_rocm.generation import recorder
from hf_rocm.generation.state import known
from tests.generation import faults
from tests.generation.conftest import counted
from tests.generation.test_user_caches import close

SIZES = {
    "bart": {"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "max_position_embeddings": 128},
    "whisper": {"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "num_mel_bins": 8},
    "t5": {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 2},
}
# The same decoders with other class names.
FURTHER = {"mbart": SIZES["bart"], "mt5": SIZES["t5"]}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SPECIAL = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2}
CLASSES = {"bart": "Bart", "mbart": "MBart", "whisper": "Whisper", "t5": "T5", "mt5": "MT5"}
MASKS_IN_FOUR_DIMENSIONS = Version("5.0") <= Version(transformers.__version__)
NEW = 14


def make(kind, **changes):
    arguments = {**SPECIAL, **{**SIZES, **FURTHER}[kind], **changes}
    if kind not in ("t5", "mt5"):
        arguments |= HEADS
    if kind == "whisper":
        arguments |= {"max_source_positions": 20, "max_target_positions": 128}
        arguments |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    if kind in ("bart", "mbart"):
        arguments |= {"forced_eos_token_id": None}
    config = getattr(transformers, f"{CLASSES[kind]}Config")(**arguments)
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.4)
    model.tie_weights()
    return model.eval()


def make_inputs(kind, rows=2, length=9, seed=0, padded=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "whisper":
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    ids = torch.randint(3, 61, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, -padded:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, *, new=NEW, **arguments):
    arguments.setdefault("do_sample", False)
    return model.generate(**inputs, max_new_tokens=new, **arguments)


@pytest.fixture
def couple(recorded_on_cpu):
    def build(kind, *, graphs=True, **changes):
        stock = make(kind, **changes)
        return hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=graphs), stock

    return build


@pytest.mark.parametrize("kind", [*SIZES, *FURTHER])
def test_tokens_equal_stock_and_recordings_are_reused(kind, couple):
    prepared, stock = couple(kind)
    for seed in (0, 1, 2):
        inputs = make_inputs(kind, seed=seed)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert counted(prepared) == (1, 3 * (NEW - 1) - 3)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_padded_encoder_inputs_equal_stock(kind, couple):
    prepared, stock = couple(kind, graphs=None)
    for seed, padded in ((0, 3), (1, 4), (2, 0), (3, 2)):
        inputs = make_inputs(kind, seed=seed, padded=padded)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    if MASKS_IN_FOUR_DIMENSIONS:
        assert counted(prepared)[1] > 2 * NEW and not known(prepared).turned_away
    else:
        assert known(prepared).turned_away["the inputs of the encoder are padded"] == 3
    assert known(prepared).disabled is None


@pytest.mark.parametrize("kind", SIZES)
def test_other_batches_lengths_and_sampling_equal_stock(kind, couple):
    prepared, stock = couple(kind)
    for rows, length, new in ((1, 4, 8), (3, 9, 40), (1, 4, 12), (2, 17, 9)):
        inputs = make_inputs(kind, rows=rows, length=length)
        tokens = []
        for model in (prepared, stock):
            torch.manual_seed(rows)
            tokens.append(generate(model, inputs, new=new, do_sample=True, top_k=10, num_return_sequences=2))
        assert torch.equal(*tokens)
    assert counted(prepared)[1] > 40


@pytest.mark.parametrize("kind", SIZES)
def test_returned_outputs_equal_stock(kind, couple):
    prepared, stock = couple(kind)
    options = {"return_dict_in_generate": True, "output_scores": True}
    for seed in (0, 1):
        inputs = make_inputs(kind, seed=seed)
        actual, expected = generate(prepared, inputs, **options), generate(stock, inputs, **options)
        assert type(actual) is type(expected) and list(actual) == list(expected)
        assert torch.equal(actual.sequences, expected.sequences)
        close(torch.stack(actual.scores), torch.stack(expected.scores))
        caches = actual.past_key_values, expected.past_key_values
        # Whisper's `generate` splits the caches.
        if kind == "whisper":
            assert type(caches[0]) is type(caches[1])
            continue
        assert [type(cache) for cache in caches] == [EncoderDecoderCache] * 2
        assert caches[0].get_seq_length() == caches[1].get_seq_length() and caches[0].is_updated == caches[1].is_updated
        for name in ("self_attention_cache", "cross_attention_cache"):
            for one, two in zip(*(tensors(getattr(cache, name)) for cache in caches), strict=True):
                close(one, two)
    assert counted(prepared)[1] > NEW


def tensors(cache):
    assert type(cache) is DynamicCache
    if hasattr(cache, "layers"):
        # as in stock transformers, the cache has as many layers as the encoder; the decoder does not use all of them
        used = [layer for layer in cache.layers if layer.keys is not None]
        return [tensor for layer in used for tensor in (layer.keys, layer.values)]
    return [*cache.key_cache, *cache.value_cache]


@pytest.mark.parametrize("kind", SIZES)
def test_a_wrong_replay_is_detected(kind, couple):
    """The comparison covers cross-attention, whose keys are moved, so that the recording reads their old address."""
    prepared, stock = couple(kind, graphs=None)
    generate(prepared, make_inputs(kind))
    cache = known(prepared).pool._idle[0].cache
    for layer in cache.cross_attention_cache.layers:
        # The clone has an address that the recording does not read.
        layer.keys = layer.keys.clone()
    for seed in (3, 4):
        inputs = make_inputs(kind, seed=seed)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert "differed from the step itself" in known(prepared).disabled


@pytest.mark.parametrize("kind", SIZES)
def test_a_call_restarts_after_a_wrong_replay(kind, couple, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(faults.garbage, first=6))
    prepared, stock = couple(kind, graphs=None)
    inputs = make_inputs(kind)
    assert torch.equal(generate(prepared, inputs, new=25), generate(stock, inputs, new=25))
    assert "differed from the step itself" in known(prepared).disabled
    assert torch.equal(generate(prepared, inputs, new=25), generate(stock, inputs, new=25))


def test_passed_caches_run_as_in_stock(couple):
    prepared, stock = couple("bart", graphs=None)
    inputs = make_inputs("bart")
    tokens = [
        generate(model, inputs, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
        for model in (prepared, stock)
    ]
    assert torch.equal(*tokens)
    assert counted(prepared) == (0, 0)


def test_a_decoder_with_another_attention_implementation_runs_uncaptured(couple):
    prepared, stock = couple("t5", graphs=None)
    if stock.config._attn_implementation == "eager":
        pytest.skip("in this release, T5 has no other implementation")
    inputs = make_inputs("t5")
    for _ in range(3):
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    replayed = counted(prepared)[1]
    for model in (prepared, stock):
        if model.decoder.config is model.config:
            model.decoder.config = copy.deepcopy(model.config)
        model.decoder.config._attn_implementation = "eager"
    for _ in range(3):
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert counted(prepared)[1] == replayed and known(prepared).disabled is None
    assert any("implementations: eager, sdpa" in reason for reason in known(prepared).turned_away)
