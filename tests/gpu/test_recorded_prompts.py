"""Prompts in recorded graphs on a GPU: replays equal uncaptured prompts, also from several threads and streams."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hf_rocm import options
from hf_rocm.forwards import runner
from hf_rocm.forwards.state import known
from tests.forwards.conftest import counted, logits_of, with_twin
from tests.forwards.test_quantized_weights import KINDS as QUANTIZED
from tests.forwards.test_quantized_weights import SIZES, quantized_pair
from tests.generation.conftest import KINDS, generate, make, prompt
from tests.threads import running

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def unprobed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    # First-use checks take seconds, and other tests cover them.
    with options.override(probe=False):
        yield


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """Keep recordings whose replays take longer than these tiny prompts."""
    monkeypatch.setattr(runner, "_is_timed", lambda device: False)


def build(kind="llama", dtype=torch.bfloat16):
    """Return a model whose prompts are recorded, and one that runs the same kernels uncaptured."""
    return with_twin(make(kind).to("cuda", dtype))


def on_gpu(**arguments):
    return {name: tensor.cuda() for name, tensor in prompt(**arguments).items()}


def assert_prompts_equal(prepared, twin, *, length):
    """Eight prompts of this length. In the second one, some operators are decomposed, which may change the rounding."""
    with options.override(pad_tokens=0):
        for seed in range(8):
            inputs = on_gpu(length=length, seed=seed)
            actual, expected = logits_of(prepared, inputs), logits_of(twin, inputs)
            if seed == 1:
                torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))
            else:
                assert torch.equal(actual, expected), seed


# Gemma 2's attention creates a mask from a number on the host. In fp32, Mixtral's experts copy numbers to the host.
UNRECORDED = {"gemma2": "it creates a tensor on the device from values on the host"}
UNRECORDED_IN_FP32 = {**UNRECORDED, "mixtral": "Cannot copy"}


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_prompts_of_one_length_are_bitwise_equal(kind):
    prepared, twin = build(kind)
    assert_prompts_equal(prepared, twin, length=40)
    state = known(prepared)
    assert state.disabled is None
    if kind in UNRECORDED:
        assert_unrecorded(prepared, UNRECORDED[kind])
    else:
        assert counted(prepared) == (1, 5), state.turned_away


@pytest.mark.parametrize("kind", QUANTIZED)
def test_replayed_prompts_with_quantised_weights_are_bitwise_equal(kind):
    prepared, twin = quantized_pair(make("llama", **SIZES).to("cuda"), kind)
    assert_prompts_equal(prepared, twin, length=80)
    state = known(prepared)
    assert state.disabled is None and counted(prepared) == (1, 5), state.turned_away


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_many_lengths_are_equal_except_for_rounding(kind):
    prepared, twin = build(kind, torch.float32)
    for seed in range(24):
        inputs = on_gpu(length=(20 + 7 * seed) % 60 + 3, seed=seed)
        expected, actual = logits_of(twin, inputs), logits_of(prepared, inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    state = known(prepared)
    assert state.disabled is None and state.unpadded is None
    if kind in UNRECORDED_IN_FP32:
        assert_unrecorded(prepared, UNRECORDED_IN_FP32[kind])
        return
    assert counted(prepared)[0] == 2 and counted(prepared)[1] > 8, state.turned_away
    assert set(state.padded) == {32, 64}


def assert_unrecorded(model, reason):
    assert counted(model) == (0, 0)
    assert any(reason in turned_away for turned_away in known(model).turned_away)


@pytest.mark.parametrize("padded", [0, 5])
def test_left_padding(padded):
    prepared, twin = build(dtype=torch.float32)
    for seed in range(8):
        inputs = on_gpu(length=40, seed=seed, padded=padded)
        expected, actual = logits_of(twin, inputs), logits_of(prepared, inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert known(prepared).disabled is None


def test_forwards_without_a_cache():
    prepared, twin = build()
    caches = []
    for seed in range(8):
        inputs = on_gpu(length=40, seed=seed)
        with torch.no_grad():
            actual, expected = (model(**inputs, logits_to_keep=1) for model in (prepared, twin))
        assert torch.equal(actual.logits, expected.logits)
        caches.append((actual.past_key_values, expected.past_key_values))
    # Later prompts have not overwritten the caches of earlier ones.
    for one, other in caches:
        for layer, same in zip(one.layers, other.layers, strict=True):
            assert torch.equal(layer.keys, same.keys) and torch.equal(layer.values, same.values)
    assert counted(prepared)[0] == 1


def test_threads_on_separate_streams_return_correct_results():
    """Recordings of different lengths share the memory of keys and values."""
    prepared, twin = build()
    other, other_twin = build("qwen3")
    wrong = []

    def work(model, expected, length):
        with torch.cuda.stream(torch.cuda.Stream()):
            for seed in range(40):
                inputs = on_gpu(length=length, seed=seed)
                if not torch.equal(logits_of(model, inputs), logits_of(expected, inputs)):
                    wrong.append((length, seed))
            torch.cuda.current_stream().synchronize()

    jobs = [(prepared, twin, 36), (prepared, twin, 40), (prepared, twin, 40), (other, other_twin, 40)]
    with options.override(pad_tokens=0), running(*(partial(work, *job) for job in jobs), interval=1e-4) as errors:
        pass
    assert not errors and not wrong and known(prepared).disabled is None and known(other).disabled is None


def test_memory_stays_within_the_limit():
    prepared, _ = build()
    with options.override(graphs_memory="2MiB", pad_tokens=0):
        for length in range(3, 30):
            for seed in range(3):
                generate(prepared, on_gpu(length=length, seed=seed), new=2)
            assert known(prepared).summary()[1] <= 2 * 2**20
