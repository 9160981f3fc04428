"""Models' routers with the Triton kernel: results equal stock's, and unsupported calls run the stock forward."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig

from hf_rocm import ops, options
from hf_rocm.overlay import bind
from hf_rocm.overlay.activate import activate
from hf_rocm.tools.specifications import specifications

FEW = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 32}
LOCAL = {"num_local_experts": 16, "num_experts_per_tok": 4, "hidden_size": 32}
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "hidden_size": 32, "n_group": 4, "topk_group": 2}
ROUTERS = {
    "gpt_oss": ("GptOssTopKRouter", LOCAL),
    "mixtral": ("MixtralTopKRouter", LOCAL),
    "olmoe": ("OlmoeTopKRouter", FEW),
    "qwen2_moe": ("Qwen2MoeTopKRouter", FEW),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {**FEW, "norm_topk_prob": True}),
    "deepseek_v3": ("DeepseekV3TopkRouter", GROUPS),
    "dots1": ("Dots1TopkRouter", GROUPS),
    "glm4_moe": ("Glm4MoeTopkRouter", GROUPS),
    "glm4_moe_lite": ("Glm4MoeLiteTopkRouter", GROUPS),
}


def router(name):
    cls, settings = ROUTERS[name]
    activate(name, everywhere=False)
    module = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), cls)(
        AutoConfig.for_model(name, **settings)
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0, 0.2)
    return module


def run_both(module, x, mode=bind.ON):
    bind.set_mode(module, bind.OFF)
    stock = module(x)
    bind.set_mode(module, mode)
    with options.override(tier="experts=triton,linear=torch"), ops.recording() as routes:
        actual = module(x)
    return actual, stock, [route.tier for route in routes if route.operation == "choose_experts"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_they_return_stocks_results(name, dtype):
    module = router(name).to(dtype)
    agree(module, dtype)
    representative = torch.arange(16)
    # Experts 8–11 equal experts 4–7, so either may be selected.
    representative[8:12] = representative[4:8]
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data[representative]
    agree(module, dtype, representative)


def agree(module, dtype, representative=None):
    with torch.no_grad():
        actual, stock, tiers = run_both(module, torch.randn(7, 32).to(dtype))
    assert tiers == ["triton"]
    (logits, weights, ids), (expected_logits, expected, expected_ids) = actual, stock
    assert torch.equal(logits, expected_logits)
    if representative is not None:
        ids, expected_ids = representative[ids], representative[expected_ids]
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    weights, expected = weights.gather(1, order), expected.gather(1, expected_order)
    assert weights.dtype == expected.dtype
    # one rounding step for each of the two results
    step = torch.finfo(weights.dtype).eps * expected.abs().max().item()
    assert (weights.double() - expected.double()).abs().max().item() <= 2 * step


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in ("gpt_oss", "deepseek_v3") for change in ("gradients", "autocast", "linear")),
        ("gpt_oss", "fp64"),
    ],
)
def test_unsupported_routers_stay_stock(name, change, monkeypatch):
    module, x = router(name), torch.randn(3, 32)
    if change == "fp64":
        module, x = module.double(), x.double()
    if change == "linear":
        linear = torch.nn.functional.linear
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *arguments: linear(*arguments))
    autocast = torch.autocast("cpu", torch.bfloat16) if change == "autocast" else nullcontext()
    with autocast, torch.set_grad_enabled(change == "gradients"):
        actual, stock, tiers = run_both(module, x)
    assert not tiers
    assert all(torch.equal(one, other) for one, other in zip(actual, stock, strict=True))


@pytest.mark.parametrize("choice", [{"tiers": {"linear": "aiter"}}, {"aiter": "linear"}], ids=["tier", "switch"])
def test_a_required_aiter_tier_does_not_apply_to_routers(choice):
    """The GEMM of a router must not raise if aiter is required but has no kernel for it."""
    if "aiter" in choice:
        choice = {"aiter": {**options.current().aiter, "linear": options.Switch.REQUIRED}}
    module, x = router("gpt_oss"), torch.randn(3, 32)
    bind.set_mode(module, bind.ON)
    with torch.no_grad(), options.override(**choice), ops.recording() as routes:
        module(x)
    assert not routes


@pytest.mark.parametrize(("name", "scores"), [("gpt_oss", "softmax of the chosen"), ("deepseek_v3", "sigmoid")])
def test_explain_lists_their_selection_and_no_norm(name, scores):
    module = router(name)
    bind.set_mode(module, bind.ON)
    assert [(operation, situation) for operation, situation, _ in specifications(module)] == [
        ("choose_experts", f"4 of 16, {scores}")
    ]
