"""Triton kernels pass the small cases that check them before their first use, and a wrong kernel fails them."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.ops import probe_cases, registry

CPU = torch.device("cpu")
BF16 = torch.bfloat16
PLAIN_AND_INTERLEAVED = (True, False, True, False, True, 0, False, False)
KINDS = {
    "rms_norm": (BF16, BF16, CPU, 48, False, False),
    "add_rms_norm": (BF16, BF16, CPU, 48, True, False),
    "norm_add": (BF16, BF16, CPU, 48, False, True, False),
    "add_layer_norm": (BF16, BF16, CPU, 48, True, True, False),
    "act": (BF16, CPU, "quick_gelu", False),
    "act_and_mul": (BF16, CPU, 24, "clamped_swiglu", False, True),
    "rope": (BF16, BF16, CPU, 16, 8, True, False, False),
    "rotary_angles": (BF16, torch.float32, torch.int64, CPU, 24, "halves", False),
    "rope_into_cache": (BF16, BF16, CPU, 16, 12, 16, False, True, True, False, False, None, False, False),
    "attend_into_cache": (BF16, BF16, CPU, 4, 2, 16, 12, 8, False, True, BF16, False, True, True, True, 5, False),
    "append_tokens": (torch.int64, CPU, 4, 2, True, True, True, True, True, False),
    "begin_step": (BF16, CPU, 2, 4, 2, None, 5, True, 6, 2, 2, True, True, True, False),
    "look_up_drafts": (torch.int64, CPU, 6, 2, True, True, True, False),
    "finish_step": (BF16, torch.int64, CPU, 4, 2000, 5, True, True, True, False),
    "round_rows": (BF16, torch.int8, CPU, 48),
    "choose_experts": (BF16, torch.float32, CPU, 16, 3, "sigmoid", True, 4, 2, 2, True, False),
    "gated_delta_prefill": (BF16, BF16, torch.float32, CPU, 12, 20, 2, 4, False),
    "gated_delta_step": (BF16, BF16, torch.float32, CPU, 12, 20, 2, 4, False),
    "experts": (BF16, BF16, CPU, 4, 16, 8, 1, "clamped_swiglu", True, True, True, False, True, 0, False, False),
    "experts_add": (BF16, BF16, CPU, 4, 16, 8, 1, "clamped_swiglu", True, True, True, False, True, 0, False, False),
    "mxfp4_experts": (BF16, torch.uint8, CPU, 4, 32, 32, 1, "clamped_swiglu", *PLAIN_AND_INTERLEAVED),
}
NAMES = {
    "act": "act_kernel",
    "add_layer_norm": "layer_norm_kernel",
    "act_and_mul": "act_and_mul_kernel",
    "rope": "rope_kernel",
    "rope_into_cache": "rope_kernel",
    "rotary_angles": "rotary_angles_kernel",
    "round_rows": "round_rows_kernel",
    "append_tokens": "append_kernel",
    "begin_step": "begin_kernel",
    "look_up_drafts": "look_up_kernel",
    "attend_into_cache": "decode_kernel, new keys",
    "finish_step": "logits_kernel",
    "choose_experts": "routing_kernel",
    "gated_delta_prefill": "recurrence_kernel",
    "gated_delta_step": "delta_step_kernel",
    "experts": "chosen_experts",
    "experts_add": "chosen_experts",
    "mxfp4_experts": "chosen_experts",
}


@pytest.mark.parametrize("operation", KINDS)
def test_every_kernel_passes_its_check(operation):
    name = NAMES.get(operation, "rms_norm_kernel")
    assert probe_cases.check(operation, "triton", name, KINDS[operation]) is None


@pytest.mark.parametrize(
    "extra", [(False, None, False), (False, BF16, False), (False, torch.float32, True), (True, BF16, True)], ids=str
)
def test_a_kernel_for_single_tokens_passes_its_check(extra):
    kind = (BF16, BF16, CPU, 16, 16, 12, False, True, True, True, *extra, False)
    assert probe_cases.check("rope_into_cache", "triton", "rope_kernel", kind) is None


@pytest.mark.parametrize("one", [True, False])
def test_a_kernel_that_writes_the_first_rows_passes_its_check(one):
    kind = (BF16, BF16, CPU, 16, 12, 16, False, True, None, one, False, BF16, False, False)
    assert probe_cases.check("rope_into_cache", "triton", "rope_kernel", kind) is None


def test_experts_in_mxfp4_without_biases_pass_their_check():
    extra = (False, *PLAIN_AND_INTERLEAVED[1:])
    kind = (BF16, torch.uint8, CPU, 4, 32, 32, 1, "silu", *extra)
    assert probe_cases.check("mxfp4_experts", "triton", "chosen_experts", kind) is None


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("norm_add", (BF16, BF16, CPU, 48, False, False, False)),
        ("add_layer_norm", (BF16, BF16, CPU, 48, True, False, False)),
        ("add_layer_norm", (BF16, BF16, CPU, 48, False, False, False)),
    ],
    ids=str,
)
def test_calls_without_one_of_the_outputs_pass_their_check(operation, kind):
    name = NAMES.get(operation, "rms_norm_kernel")
    assert probe_cases.check(operation, "triton", name, kind) is None


@pytest.mark.parametrize("operation", KINDS)
def test_a_wrong_kernel_fails(operation, monkeypatch):
    known = registry.operations()[operation]
    correct = next(route for route in known.implementations if route.tier == "triton")

    def wrong(*arguments):
        result = correct.call(*arguments)
        last = (result[-1] if isinstance(result, tuple) else result).view(-1)[-1]
        last.logical_not_() if last.dtype == torch.bool else last.add_(1)
        return result

    changed = registry.Implementation("triton", correct.name, correct.refuses, wrong)
    monkeypatch.setattr(
        known,
        "implementations",
        [changed if implementation is correct else implementation for implementation in known.implementations],
    )
    assert "wrong" in probe_cases.check(operation, "triton", correct.name, KINDS[operation])
