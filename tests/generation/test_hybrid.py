"""Recorded steps of a model with recurrent states: stock's tokens, updates in place, and detection of wrong states."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

import hf_rocm
from hf_rocm import ops
from hf_rocm.errors import GraphError
from hf_rocm.generation.hybrid import RECURRENT, HybridDecodeCache
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make, prompt
from tests.generation.emulator import Operators
from tests.releases import RELEASE

recorded = pytest.mark.skipif(Version("5.16") > RELEASE, reason="not run: recurrent states have a different layout")


@pytest.mark.skipif(
    Version("4.57") > RELEASE or Version("5.16") <= RELEASE,
    reason="not run: this release does not have the model, or its steps are recorded",
)
def test_older_releases_raise_with_the_reason(recorded_on_cpu):
    with pytest.raises(GraphError, match=r"recurrent states|static cache|own cache class"):
        hf_rocm.prepare(make("qwen3_next"), force=True, graphs=True)


@recorded
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_greedy_tokens_equal_stock(length, padded, pair):
    prepared, stock = pair("qwen3_next")
    inputs = prompt(length=length + padded, padded=padded)
    with torch.no_grad():
        assert torch.equal(generate(prepared, inputs, new=30), generate(stock, inputs, new=30))
    recordings, replays = counted(prepared)
    assert recordings >= 1 and replays >= 15


@recorded
def test_uncaptured_steps_run_the_operation_and_replays_run_no_python(pair):
    prepared, _ = pair("qwen3_next")
    with torch.no_grad(), ops.recording() as routes:
        generate(prepared, new=30)
    calls = sum(route.operation == "gated_delta_step" for route in routes)
    # Two recurrent layers in 29 steps.
    assert 0 < calls < 2 * 29


@recorded
def test_caches_and_recordings_are_reused(pair):
    prepared, stock = pair("qwen3_next")
    with torch.no_grad():
        for seed in range(3):
            inputs = prompt(seed=seed)
            assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
        (idle,) = known(prepared).pool._idle
        assert type(idle.cache) is HybridDecodeCache and idle.cache.windows == (RECURRENT, None, RECURRENT)
        before = [state.data_ptr() for state in idle.cache._states.values()]
        recordings = counted(prepared)[0]
        generate(prepared, prompt(seed=4))
        assert counted(prepared)[0] == recordings
    (idle,) = known(prepared).pool._idle
    assert [state.data_ptr() for state in idle.cache._states.values()] == before and len(before) == 4


@recorded
def test_alternating_inference_mode_and_no_grad_keeps_the_tokens(pair):
    prepared, stock = pair("qwen3_next")
    with torch.no_grad():
        expected = generate(stock)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(generate(prepared), expected)


@recorded
def test_sampling_and_beam_search_equal_stock(pair):
    prepared, stock = pair("qwen3_next")
    with torch.no_grad():
        for options in (
            {"do_sample": True, "seed": 3},
            {"num_beams": 3},
            {"do_sample": True, "num_return_sequences": 2, "seed": 1},
        ):
            assert torch.equal(generate(prepared, **options), generate(stock, **options))


@recorded
def test_rows_may_end_early(pair, ends_checked_late):
    prepared, stock = pair("qwen3_next")
    with torch.no_grad():
        end = int(generate(stock)[0, -4])
        assert torch.equal(generate(prepared, eos_token_id=end), generate(stock, eos_token_id=end))
        # This call uses the same cache.
        assert torch.equal(generate(prepared), generate(stock))


@recorded
@pytest.mark.parametrize("name", ["recurrent_states", "conv_states"])
def test_a_wrong_state_is_detected(name, pair, monkeypatch):
    """If a replay changes a state differently from the step itself, the call returns the step's tokens."""
    prepared, stock = pair("qwen3_next", graphs=None)
    replay = Operators.replay

    def wrong(self):
        replay(self)
        for cache in caches:
            cache._states[2, name].mul_(1.5)

    caches = []
    original = HybridDecodeCache.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(HybridDecodeCache, "__init__", init)
    monkeypatch.setattr(Operators, "replay", wrong)
    with torch.no_grad():
        assert torch.equal(generate(prepared), generate(stock))
        caches.clear()
    assert "differed from the step itself" in known(prepared).disabled


@recorded
def test_calls_that_need_transformers_cache_run_uncaptured(pair):
    prepared, stock = pair("qwen3_next", graphs=None)
    with torch.no_grad():
        result = generate(prepared, return_dict_in_generate=True)
        assert torch.equal(result.sequences, generate(stock))
    assert type(result.past_key_values).__name__ == "DynamicCache" and counted(prepared) == (0, 0)
