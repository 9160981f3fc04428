"""Routed experts with the real aiter package: the expected kernels, the shuffled order, correct results."""

from __future__ import annotations

import pytest
import torch

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.moe_shuffled import PLAIN
from hf_rocm.ops.moe_torch import eager
from hf_rocm.ops.specs.experts import ExpertsCall
from tests.tolerance import assert_as_good_as_eager

E, H, I = 6, 64, 128  # noqa: E741 - the alphabet of shapes

pytestmark = pytest.mark.usefixtures("kernels", "mi300x")


def drawn(tokens, dtype, top=2):
    generator = torch.Generator().manual_seed(tokens)
    x, gate_up, down = (torch.randn(*size, generator=generator) for size in ((tokens, H), (E, 2 * I, H), (E, H, I)))
    ids = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :top]
    weights = torch.rand(tokens, top, generator=generator)
    return x.to(dtype), (gate_up / 8).to(dtype), (down / 8).to(dtype), ids, weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 63])
def test_fused_moe_is_as_accurate_as_the_eager_tier(kernels, tokens, dtype):
    x, gate_up, down, ids, weights = drawn(tokens, dtype)
    shuffled = ops.shuffle_experts(gate_up), ops.shuffle_experts(down)
    del kernels.CALLS[:]
    with options.override(tiers={"experts": "aiter"}, probe=False), ops.recording() as routes:
        output = ops.shuffled_experts(x, *shuffled, ids, weights)
    assert [(route.operation, route.tier, route.name) for route in routes] == [
        ("shuffled_experts", "aiter", "fused_moe")
    ]
    assert [call.kernel for call in kernels.CALLS] == ["moe_sorting_fwd", "ck_moe_stage1", "ck_moe_stage2"]
    measure = eager(ExpertsCall(x, gate_up, down, ids, weights, None, None, PLAIN))
    wide = [tensor.double() for tensor in (x, gate_up, down)]
    expected = eager(ExpertsCall(*wide, ids, weights.double(), None, None, PLAIN))
    assert_as_good_as_eager(output, measure, expected)


def test_the_probe_passes_and_the_kernel_is_used(kernels):
    x, gate_up, down, ids, weights = drawn(5, torch.bfloat16)
    with options.override(tiers={"experts": "aiter"}), ops.recording() as routes:
        ops.shuffled_experts(x, ops.shuffle_experts(gate_up), ops.shuffle_experts(down), ids, weights)
    assert routes[0].name == "fused_moe"


def test_a_wrong_kernel_is_not_used(kernels, break_kernel):
    break_kernel("ck_moe_stage2:nan")
    x, gate_up, down, ids, weights = drawn(5, torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="fused_moe"), ops.recording() as routes:
        ops.shuffled_experts(x, ops.shuffle_experts(gate_up), ops.shuffle_experts(down), ids, weights)
    assert (routes[0].tier, routes[0].name) == ("torch", "unshuffle, loop")


def test_weights_in_the_plain_order_are_refused(kernels):
    tensors = drawn(5, torch.bfloat16)
    with options.override(tiers={"experts": "aiter"}), pytest.raises(TierUnavailable) as caught:
        ops.experts(*tensors)
    assert "only shuffled weights" in str(caught.value.facts)
    with ops.recording() as routes:
        ops.experts(*tensors)
    assert routes[0].tier == "torch"


def test_it_compiles_without_graph_breaks(kernels):
    x, gate_up, down, ids, weights = drawn(5, torch.bfloat16)
    shuffled = ops.shuffle_experts(gate_up), ops.shuffle_experts(down)
    with options.override(tiers={"experts": "aiter"}, probe=False), torch.no_grad():
        compiled = torch.compile(
            lambda x: ops.shuffled_experts(x, *shuffled, ids, weights), fullgraph=True, backend="eager"
        )
        assert torch.equal(compiled(x), ops.shuffled_experts(x, *shuffled, ids, weights))


def mixtral():
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).to(torch.bfloat16).eval()


def test_a_model_with_shuffled_copies_of_its_experts_runs_fused_moe(kernels):
    model, given = mixtral(), {"input_ids": torch.arange(5)[None]}
    with torch.inference_mode():
        expected = model(**given).logits
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    nbytes = sum(parameter.nbytes for parameter in experts)
    with options.override(probe=False), torch.no_grad():
        hf_rocm.prepare(model, force=True, preshuffle="all", budget=2**30)
        with ops.recording() as routes:
            actual = model(**given).logits
        assert [(route.tier, route.name) for route in routes if "experts" in route.operation] == [
            ("aiter", "fused_moe")
        ]
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
        for parameter in experts:
            # The shuffled copies must be updated too.
            parameter.mul_(0.5)
        with ops.recording() as routes:
            halved = model(**given).logits
        assert "shuffled_experts" in [route.operation for route in routes] and not torch.equal(halved, actual)
        hf_rocm.prepare(model, force=True, preshuffle="all", budget=nbytes - 1)
        with ops.recording() as routes:
            model(**given)
        assert "shuffled_experts" not in [route.operation for route in routes]
    hf_rocm.restore(model)
    assert not [name for module in model.modules() for name in module.__dict__ if name.startswith("_hf_rocm_group")]
