"""The arithmetic of sharding a model, compared with real models, a simulated ring, and its own inverse."""

from __future__ import annotations

import pytest

from hf_rocm.tools.bench import known_shapes, roofline, scaling, shapes
from hf_rocm.tools.bench.scaling import Decoder

LLAMA_70B = Decoder.of(known_shapes.SHAPES["llama-70b"].settings)
MI300X = 5.3e12


@pytest.mark.parametrize("name", ["small", "qwen3-8b"])
def test_a_decoder_has_the_matrices_of_the_model(name):
    import torch

    small = {"vocab_size": 64, "intermediate_size": 96, "hidden_size": 128}
    cls, config = shapes.architecture(name, layers=2, **small)
    with torch.device("meta"):
        model = cls(config)
    decoder = Decoder.of({**known_shapes.SHAPES[name].settings, "num_hidden_layers": 2, **small}, item=4)
    weights = roofline.Weights.of(model)
    assert decoder.matrices == weights.dense and decoder.item == weights.item
    assert decoder.keys * decoder.item == 2 * roofline._key_bytes(model)
    assert decoder.weights == 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)


def test_every_layer_has_two_all_reduces_and_a_ring_sends_every_message_almost_twice():
    exchange = scaling.exchange(LLAMA_70B, 8)
    assert (exchange.sums, exchange.message, exchange.gathered) == (160, 8192 * 2, 0)
    assert exchange.sent == pytest.approx(160 * 2 * 7 / 8 * 16384)
    exchange = scaling.exchange(LLAMA_70B, 2, tokens=1024, embedding=True, head=True)
    assert (exchange.sums, exchange.message, exchange.gathered) == (161, 1024 * 16384, 128256 * 2)
    assert exchange.sent == pytest.approx(161 * exchange.message + exchange.gathered / 2)
    assert scaling.exchange(LLAMA_70B, 1).sent == 0


def test_a_simulated_ring_sends_the_computed_bytes():
    """Four ranks, one chunk per step: count the bytes that the first rank sends."""
    ranks, message = 4, 4096
    sent = sum(message // ranks for _ in range(2 * (ranks - 1)))
    assert scaling.Exchange(ranks, 1, message).sent == sent
    assert scaling.wire_seconds(message, ranks, link=1e9) == pytest.approx(sent / 1e9)


def test_across_nodes_every_gpu_sends_its_share():
    one = scaling.nodes_wire_seconds(2**20, nodes=1, per_node=8, link=64e9, nic=50e9)
    assert one == pytest.approx(scaling.wire_seconds(2**20, 8, 64e9))
    two = scaling.nodes_wire_seconds(2**20, nodes=2, per_node=8, link=64e9, nic=50e9)
    assert two - one == pytest.approx(2**20 / 8 / 50e9)


def test_at_the_allowed_time_more_ranks_are_exactly_as_fast_as_fewer():
    allowed = scaling.allowed_seconds(LLAMA_70B, 4, 8, MI300X)
    fewer = scaling.step_seconds(LLAMA_70B, 4, MI300X)
    more = scaling.step_seconds(LLAMA_70B, 8, MI300X) + scaling.exchange(LLAMA_70B, 8).sums * allowed
    assert more == pytest.approx(fewer)
    alone = scaling.step_seconds(LLAMA_70B, 1, MI300X)
    assert alone == pytest.approx(8 * scaling.step_seconds(LLAMA_70B, 8, MI300X))
    sums = scaling.exchange(LLAMA_70B, 8).sums * scaling.allowed_seconds(LLAMA_70B, 1, 8, MI300X)
    assert alone == pytest.approx(scaling.step_seconds(LLAMA_70B, 8, MI300X) + sums)


def test_the_context_is_read_in_addition_to_the_weights():
    short = scaling.step_seconds(LLAMA_70B, 2, MI300X)
    long = scaling.step_seconds(LLAMA_70B, 2, MI300X, batch=4, context=1000)
    assert long - short == pytest.approx(4 * 1000 * 327680 / 2 / MI300X)
