"""Tiny models end to end with the aiter tier: as close to float64 as the eager tier, with aiter's operations."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from hf_rocm import ops, options
from tests.tolerance import assert_as_good_as_eager

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kernels", "mi300x")

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
NEW_TOKENS = 8
# Longer than the window of 5.
PROMPT = torch.arange(3, 17).view(2, 7)


def build(name, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        # Change norms and sinks too, because constant values hide errors.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(torch.bfloat16)


def generate(model):
    """Generate greedily. Returns (tokens, logits of the new tokens [B, new, V])."""
    with torch.no_grad():
        result = model.generate(
            PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    return result.sequences, torch.stack(result.logits, dim=1)


def check(model, wide):
    """Generate with aiter, and compare the logits with those of the eager tier and of float64. Returns the routes."""
    with options.override(probe=False), ops.recording() as routes:
        tokens, logits = generate(model)
    assert tokens.shape == (2, 7 + NEW_TOKENS)

    def teacher_forced(value):
        with torch.no_grad(), options.override(tier="eager"):
            return value(tokens[:, :-1], use_cache=False).logits[:, 6:]

    eager = teacher_forced(model)
    expected = teacher_forced(wide).double()
    # generate returns fp32 copies of logits that were computed in bf16
    assert_as_good_as_eager(logits.to(torch.bfloat16), eager, expected)
    chosen = expected.gather(-1, tokens[:, 7:, None]).squeeze(-1)
    assert (expected.amax(-1) - chosen).max() <= 2 * (eager.double() - expected).abs().max() + 0.05
    return routes


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_models_with_overlays_run_on_aiter(kernels, name):
    import hf_rocm

    model = build(name)
    wide = copy.deepcopy(model).double()
    hf_rocm.prepare(model, force=True)
    try:
        del kernels.CALLS[:]
        routes = check(model, wide)
        # two rows have two tables of angles, which aiter's RoPE doesn't support
        assert {route.tier for route in routes if route.operation != "rope"} == {"aiter"}
        assert {route.tier for route in routes if route.operation == "rope"} == {"torch"}
        normed = {"rms_norm", "add_rms_norm"}
        assert {route.operation for route in routes} == {"attention", "linear", "act_and_mul", "rope", *normed}
        called = Counter(call.kernel for call in kernels.CALLS)
        assert called["mha_fwd"] == 2 * NEW_TOKENS and called["silu_and_mul"] == 2 * NEW_TOKENS
        assert called["rmsnorm2d_fwd"] == (7 if name == "Qwen3" else 3) * NEW_TOKENS
        assert called["rmsnorm2d_fwd_with_add"] == 2 * NEW_TOKENS
        grouped = [call.arguments for call in kernels.CALLS if call.kernel == "mha_fwd"]
        # Keys are not expanded.
        assert all(call["q"][1][2] == 4 and call["k"][1][2] == 2 for call in grouped)
        assert "aiter, mha_fwd" in hf_rocm.explain(model).details()
    finally:
        hf_rocm.restore(model)


def test_a_left_padded_batch_is_packed(kernels):
    """Prefill runs on packed sequences, without the padding."""
    import hf_rocm

    model = build("Llama")
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    hf_rocm.prepare(model, force=True)
    try:
        del kernels.CALLS[:]
        with torch.no_grad(), options.override(probe=False), ops.recording() as routes:
            actual = model(PROMPT, attention_mask=mask).logits
        attended = [route for route in routes if "attention" in route.operation]
        assert [(route.operation, route.tier) for route in attended] == [("varlen_attention", "aiter")] * 2
        real = int(mask.sum())
        # The padding is removed, and the keys are not expanded.
        assert [shape[0] for shape in attended[0].shapes] == [real] * 3
        assert [shape[1] for shape in attended[0].shapes] == [4, 2, 2]
        packed = [call.arguments for call in kernels.CALLS if call.kernel == "mha_varlen_fwd"]
        assert len(packed) == 2 and all(call["is_causal"] for call in packed)
        with torch.no_grad(), options.override(tier="eager"):
            eager = model(PROMPT, attention_mask=mask).logits
            expected = copy.deepcopy(model).double()(PROMPT, attention_mask=mask).logits
        keep = mask.bool()
        assert_as_good_as_eager(actual[keep], eager[keep], expected.double()[keep])
    finally:
        hf_rocm.restore(model)


def through_ops(module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, s_aux=None, **_):
    """transformers' attention interface with `ops.attention`. All masks are plain causal or windowed."""
    output, _ = ops.attention(
        query, key, value, scale=scaling, causal=True, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return output, None


@pytest.fixture
def interface(monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("through_ops", through_ops)
    ALL_MASK_ATTENTION_FUNCTIONS.register("through_ops", lambda *_, **__: None)
    yield
    for mapping in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        type(mapping)._global_mapping.pop("through_ops", None)


@pytest.mark.parametrize(
    ("name", "changes", "kernel"),
    [
        ("Gemma2", {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}, "mha_varlen_fwd"),
        ("GptOss", {**EXPERTS, "sliding_window": 5}, "mha_fwd"),
    ],
)
def test_softcap_windows_and_sinks_run_on_aiter(kernels, interface, name, changes, kernel):
    """The models are not prepared. Their attention runs through `ops.attention`, and the rest is stock."""
    model = build(name, **changes, layer_types=["sliding_attention", "full_attention"])
    if hasattr(model, "set_experts_implementation"):
        # The grouped GEMM doesn't support float64.
        model.set_experts_implementation("eager")
    wide = copy.deepcopy(model).double()
    model.set_attn_implementation("through_ops")
    wide.set_attn_implementation("eager")
    del kernels.CALLS[:]
    routes = check(model, wide)
    assert {(route.operation, route.tier) for route in routes} == {("attention", "aiter")}
    assert [call.kernel for call in kernels.CALLS] == [kernel] * 2 * NEW_TOKENS
    lefts = [call.arguments["window_size_left"] for call in kernels.CALLS]
    # A window of 5 keys extends 4 to the left.
    assert lefts == [4, -1] * NEW_TOKENS
    if name == "Gemma2":
        assert {call.arguments["logits_soft_cap"] for call in kernels.CALLS} == {2.0}


def test_warmup_builds_and_checks_kernels_in_advance(kernels, tmp_path, capsys, monkeypatch):
    """The next process uses the kernels that `hf-rocm warmup` has checked, and does not check them again."""
    from hf_rocm.cli import main
    from hf_rocm.ops import probe, probe_worker, registry

    build("Llama").save_pretrained(tmp_path / "llama")
    assert main(["warmup", str(tmp_path / "llama"), "--force", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    for kernel in ("mha_fwd", "gemm_a16w16", "act_and_mul", "rms_norm"):
        assert any(kernel in line and " aiter " in line for line in table.splitlines()), kernel
    passed = list((tmp_path / "cache" / "probes").iterdir())
    # Prefill, decode, packed batch, two GEMMs, gated activation, norm, residual sum with norm, RoPE.
    assert len(passed) == 9

    probe.forget()
    registry.forget_choices()
    monkeypatch.setattr(probe_worker, "send", lambda *_: pytest.fail("checked again"))
    assert main(["explain", str(tmp_path / "llama"), "--force", "--device", "cpu", "--all"]) == 0
    assert "attention (prefill, 4 query heads, 2 key/value heads, dim 16): aiter, mha_fwd" in capsys.readouterr().out
