"""The calls that are recorded, the reasons why others are not, and the state that is kept between calls."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import hf_rocm
from hf_rocm import options
from hf_rocm.errors import GraphError
from hf_rocm.generation import recorder
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.cache_layer import bucket
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make, outlives_steps_of_others, prompt


class OwnCache(DynamicCache):
    pass


UNCAPTURED = [
    ({"return_dict_in_generate": True, "output_hidden_states": True}, "returns hidden states"),
    ({"use_cache": False}, "no cache"),
    ({"disable_compile": True}, "disables compilation"),
    ({"past_key_values": OwnCache}, "a cache of type OwnCache"),
]


@pytest.mark.parametrize(("arguments", "reason"), UNCAPTURED)
def test_calls_that_are_not_recorded_run_as_in_stock_with_a_reason(arguments, reason, pair):
    prepared, stock = pair(graphs=None)
    results = []
    for model in (prepared, stock):
        options = {name: value() if callable(value) else value for name, value in arguments.items()}
        results.append(generate(model, prompt(), **options))
    tokens = [result if isinstance(result, torch.Tensor) else result.sequences for result in results]
    assert torch.equal(*tokens)
    assert counted(prepared) == (0, 0)
    assert [result for result in known(prepared).turned_away if reason in result]


def test_required_graphs_raise_with_the_reason(pair, monkeypatch):
    prepared, _ = pair(graphs=True)
    with pytest.raises(GraphError, match="no cache"):
        generate(prepared, use_cache=False)
    monkeypatch.delitem(recorder.factories, "cpu")
    with pytest.raises(GraphError, match="on the CPU"):
        generate(prepared)


def test_the_option_switches_graphs(recorded_on_cpu):
    for switch, replays in ((options.Switch.OFF, False), (options.Switch.AUTO, True), (options.Switch.REQUIRED, True)):
        with options.override(graphs=switch):
            prepared = hf_rocm.prepare(make("llama"), force=True)
            generate(prepared)
        assert (known(prepared) is not None and counted(prepared)[1] > 0) is replays


def test_the_users_generation_config_is_unchanged(pair, tmp_path):
    prepared, _ = pair()
    before = prepared.generation_config.to_dict()
    generate(prepared, generation_config=GenerationConfig(max_new_tokens=12, do_sample=False))
    assert prepared.generation_config.to_dict() == before
    prepared.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert getattr(saved, "cache_implementation", None) is None


def test_the_state_of_a_model_is_freed_with_it(pair):
    prepared, _ = pair()
    generate(prepared)
    cache = known(prepared).pool._idle[0].cache
    watched = [weakref.ref(cache), weakref.ref(cache.layers[0].keys)]
    gc.collect()
    gc.disable()
    try:
        del prepared, cache
        assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()


def test_idle_caches_are_bounded(pair):
    prepared, _ = pair()
    generate(prepared)
    _, nbytes = known(prepared).pool.summary()
    with options.override(graphs_memory=str(int(2.5 * nbytes))):
        for rows in (2, 1, 2, 1):
            generate(prepared, prompt(rows=rows))
        assert known(prepared).pool.summary()[0] == 2
        generate(prepared, prompt(rows=3))
        assert known(prepared).pool.summary()[1] <= 2.5 * nbytes
    with options.override(graphs_memory="0"):
        generate(prepared)
    assert known(prepared).pool.summary() == (0, 0)


def test_a_step_that_depends_on_a_host_counter_is_detected(pair):
    """A length that is a Python number would be constant in every replay. No token may come from such a recording."""
    prepared, stock = pair(graphs=None)

    def shift(module, args, output):
        output.last_hidden_state = output.last_hidden_state.roll(_token_count(output.past_key_values), -1)
        return output

    # A user's own hook would be refused.
    shift.__module__ = "transformers"
    for model in (prepared, stock):
        model.model.register_forward_hook(shift)
    assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared) == (1, 0)
    assert "differed from the step itself" in known(prepared).disabled
    assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared) == (1, 0)


def _token_count(cache):
    """The number of tokens so far, which is counted on the host."""
    if isinstance(cache, DecodeCache):
        return cache.layers[0].rows
    return int(cache.get_seq_length())


def test_a_step_that_waits_for_the_device_is_not_recorded(pair):
    prepared, stock = pair(graphs=None)

    def wait(module, args, output):
        return output * (1 + bool(output.isnan().any()))

    # A user's own hook would be refused.
    wait.__module__ = "transformers"
    for model in (prepared, stock):
        model.lm_head.register_forward_hook(wait)
    assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared) == (0, 0)
    assert "can't be recorded: operation not permitted" in known(prepared).disabled


def test_the_call_after_an_error_is_correct(pair):
    prepared, stock = pair()

    class Stop(Exception):
        pass

    class Breaking:
        calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls > 6:
                raise Stop

        def end(self):
            pass

    with pytest.raises(Stop):
        generate(prepared, streamer=Breaking(), inputs=prompt(rows=1))
    assert torch.equal(generate(prepared, prompt(rows=1)), generate(stock, prompt(rows=1)))


def test_lengths_above_256_are_rounded_up_by_a_quarter_at_most():
    previous = 0
    for tokens in range(1, 5000):
        rounded = bucket(tokens)
        assert tokens <= rounded <= max(256, 1.25 * tokens) and rounded >= previous
        previous = rounded
    assert len({bucket(tokens) for tokens in range(1, 5000)}) < 20


def test_explain_lists_recorded_and_uncaptured_calls(pair):
    prepared, _ = pair(graphs=None)
    generate(prepared)
    generate(prepared, use_cache=False)
    explanation = hf_rocm.explain(prepared).decoding
    assert explanation[0] == "steps are recorded and replayed"
    assert explanation[1] == "recorded steps: 1, replayed steps: 8, calls to generate: 1"
    operations, _, tier = explanation[2].removeprefix("kernels of the last recorded step: ").rpartition(" by ")
    assert tier == "torch" and {"linear", "rms_norm", "finish_step"} < set(operations.split(", "))
    assert "uncaptured × 1: the call uses no cache" in explanation
    off = hf_rocm.explain(hf_rocm.prepare(prepared, force=True, graphs=False))
    assert off.decoding[0] == "steps run uncaptured: graphs are switched off"
    assert not any("recorded" in sentence for sentence in off.decoding)
    assert "graphs are switched off" in str(off)


@pytest.mark.parametrize("first", [True, False])
def test_outputs_of_a_step_survive_steps_of_other_models(first, pair):
    outlives_steps_of_others(*pair(), pair("qwen3")[0], prompt(), first=first)
