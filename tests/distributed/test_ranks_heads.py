"""Heads that can't be divided are refused only if the plan divides them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers

from hf_rocm.distributed import heads
from hf_rocm.errors import RankError

AUTO = {"tp_plan": "auto"}


def llama(query=4, key_value=2, **kwargs):
    return transformers.LlamaConfig(
        hidden_size=8 * query, num_attention_heads=query, num_key_value_heads=key_value, **kwargs
    )


def planned(projections, style, **counts):
    config = llama(**counts)
    config.base_model_tp_plan = {f"layers.*.self_attn.{name}": style for name in projections}
    return config


@pytest.mark.parametrize("size", [1, 2, 4])
def test_divisible_heads_are_accepted(size):
    heads.check(llama(8, 4), size, AUTO)


@pytest.mark.parametrize(
    ("query", "key_value", "size", "named", "supported"),
    [
        (8, 4, 8, "4 (num_key_value_heads)", "1, 2, 4"),
        (8, 1, 2, "1 (num_key_value_heads)", "1"),
        (6, 3, 2, "3 (num_key_value_heads)", "1, 3"),
        (9, 3, 6, "9 (num_attention_heads) and 3 (num_key_value_heads)", "1, 3"),
    ],
)
def test_indivisible_heads_are_named_with_supported_sizes(query, key_value, size, named, supported):
    with pytest.raises(RankError) as caught:
        heads.check(llama(query, key_value), size, AUTO)
    assert caught.value.message == f"the attention heads can't be divided among {size} ranks: {named}"
    assert caught.value.facts["sizes that fit"] == supported and caught.value.facts["model"] == "llama"


@pytest.mark.parametrize("style", ["colwise_rep", "colwise_gather_output", "replicate"])
def test_with_a_gathering_plan_every_rank_has_all_heads(style):
    heads.check(planned(["q_proj", "k_proj", "v_proj"], style, query=6, key_value=3), 2, AUTO)


def test_only_divided_heads_must_be_divisible():
    heads.check(planned(["q_proj"], "colwise", query=6, key_value=3), 2, AUTO)
    with pytest.raises(RankError, match=r"3 \(num_key_value_heads\)"):
        heads.check(planned(["v_proj"], "colwise", query=6, key_value=3), 2, AUTO)


def test_the_users_plan_is_used():
    gathered = {f"layers.*.self_attn.{name}_proj": "colwise_rep" for name in "qkv"}
    heads.check(llama(6, 3), 2, {"tp_plan": gathered})
    heads.check(llama(6, 3), 2, {"distributed_config": {"tp_size": 2, "tp_plan": {}}})
    with pytest.raises(RankError):
        heads.check(llama(6, 3), 2, {"distributed_config": {"tp_size": 2}})
    heads.check(llama(6, 3), 2, {"distributed_config": {"enable_expert_parallel": True}})


def test_nested_models_are_checked():
    config = transformers.LlavaConfig(text_config=llama(6, 3))
    with pytest.raises(RankError, match=r"3 \(num_key_value_heads\)"):
        heads.check(config, 2, AUTO)


def test_the_heads_of_every_layer_are_checked():
    plan = {"layers.*.self_attn.k_proj": "colwise"}
    config = SimpleNamespace(num_key_value_heads=[2, 4, 3, 2], base_model_tp_plan=plan)
    with pytest.raises(RankError, match=r"2, 4, 3 \(num_key_value_heads\)"):
        heads.check(config, 2, AUTO)
    config.num_key_value_heads = [2, 4]
    heads.check(config, 2, AUTO)


def test_without_a_config_nothing_is_refused():
    heads.check(None, 2, AUTO)
