"""The roofline's arithmetic, compared with manual calculations."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_rocm.tools.bench import roofline
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.rates import Rates, measure
from tests.tools.bench.conftest import Part

H, I, V, D = 256, 704, 2048, 64  # noqa: E741
LAYER = H * (4 * D) + 2 * H * (2 * D) + (4 * D) * H + 3 * H * I


def test_a_decode_step_reads_every_matrix_once_and_the_keys_and_values_of_every_row(model):
    case = Case("decode", 3, 100, 40)
    read, flops = roofline.decode_work(model, case)
    # 120 is the cache's length halfway through the new tokens.
    keys = 2 * 2 * D * 120
    assert read == 4 * (LAYER + V * H + 3 * keys)
    assert flops == 3 * (2 * (LAYER + V * H) + 4 * 4 * D * 120)


def test_in_a_prefill_the_head_processes_only_the_last_token(model):
    _, flops = roofline.forward_work(model, Case("prefill", 2, 10))
    assert flops == 2 * (2 * LAYER * 10 + 2 * V * H + 4 * 4 * D * 10 * 11 / 2)


def test_the_floor_is_the_longer_of_the_two_times(model):
    case = Case("decode", 1, 8, 2)
    slow = roofline.floor(model, case, Rates(copy=1e9, matmul=1e15))
    assert slow.by == "memory" and slow.milliseconds == pytest.approx(1000 * slow.bytes / 1e9)
    slow = roofline.floor(model, case, Rates(copy=1e15, matmul=1e9))
    assert slow.by == "compute" and slow.milliseconds == pytest.approx(1000 * slow.flops / 1e9)


def test_every_rank_of_a_sharded_model_has_its_heads_and_its_traffic(model):
    case = Case("decode", 1, 100, 40)
    read, flops = roofline.decode_work(model, case, ranks=2)
    keys = 2 * 2 * D * 120
    assert read == 4 * (LAYER + V * H + keys / 2) and flops == 2 * (LAYER + V * H) + 4 * 4 * D * 120 / 2
    alone = roofline.floor(model, case, Rates(copy=1e9, matmul=1e15), ranks=2)
    shared = roofline.floor(model, case, Rates(copy=1e9, matmul=1e15), ranks=2, exchange=2e-3)
    assert shared.milliseconds == pytest.approx(alone.milliseconds + 2) and (alone.exchange, shared.exchange) == (0, 2)


def test_only_this_ranks_part_is_counted(model):
    whole = roofline.Weights.of(model)
    layer = model.model.layers[0]
    layer.mlp.gate_proj.weight = Part(layer.mlp.gate_proj.weight.detach())
    model.lm_head.weight = Part(model.lm_head.weight.detach())
    part = roofline.Weights.of(model)
    assert (whole.dense - part.dense, whole.head - part.head) == (H * I // 2 + V * H // 2, V * H // 2)


def test_a_tied_head_is_read_in_full():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    sizes = {}
    for tied in (False, True):
        config.tie_word_embeddings = tied
        sizes[tied] = roofline.Weights.of(transformers.LlamaForCausalLM(config)).dense
    assert sizes[False] == sizes[True] == 4 * 16 * 16 + 3 * 16 * 8 + 50 * 16


def test_the_expected_number_of_experts_is_read():
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    weights = roofline.Weights.of(transformers.MixtralForCausalLM(config))
    experts = 8 * 3 * 16 * 8
    assert weights.routed == experts and weights.share == 1 / 4
    assert weights.bytes(tokens=1) == 4 * (weights.dense + experts / 4)
    assert weights.bytes(tokens=2) == pytest.approx(4 * (weights.dense + experts * (1 - 0.75**2)))
    assert weights.flops() == 2 * (weights.dense + experts / 4)


def test_sliding_layers_read_their_window():
    config = transformers.Gemma2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=10,
    )
    model = transformers.Gemma2ForCausalLM(config)
    assert roofline.windows(model) == [10, None]
    assert roofline.cache_bytes(model, Case("decode", 3, 90, 10)) == 3 * (10 + 100) * 2 * 8 * 4
    assert roofline._pairs(4, 2, causal=True) == 1 + 2 + 2 + 2 and roofline._pairs(4, None, causal=False) == 16


def test_the_rates_are_measured_on_this_machine():
    rates = measure(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.copy < 1e13 and 1e8 < rates.matmul < 1e15
