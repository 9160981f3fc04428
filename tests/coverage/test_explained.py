"""The specifications listed by `explain` and `warmup` match a model's calls, and the text of `explain` stays short."""

from __future__ import annotations

import pytest
import torch

import hf_rocm
from hf_rocm.generation.state import known
from hf_rocm.ops import registry
from hf_rocm.ops.registry import Route
from hf_rocm.ops.specs.attention import AttentionSpec
from hf_rocm.tools.attention_specifications import of_attention
from hf_rocm.tools.explain_short import LINES
from hf_rocm.tools.specifications import specifications
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES

# Fields that do not depend on the tokens of a call.
CONSTANT = ("dtype", "heads", "kv_heads", "head_dim", "value_dim", "softcap", "sinks")

# text, mixture of experts, encoder-decoder, encoder, image, multimodal, several kinds of layers
SHORT = (
    *("llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss", "t5", "bart", "whisper", "bert", "vit", "clip"),
    *("paligemma", "idefics2", "qwen2_vl", "qwen3_omni_moe", "qwen3_5_moe", "qwen3_next"),
)

# Operations whose calls are exactly those that are listed.
EXACT = ("rope", "add_rms_norm")


def constant(spec):
    return tuple(getattr(AttentionSpec(*spec), field) for field in CONSTANT)


def call_fields(operation, spec):
    """Return the operation and the fields of its specification that do not depend on the tokens or the grad mode."""
    fields = registry.operations()[operation].spec_type(*spec)._asdict()
    return operation, *(value for name, value in fields.items() if name not in ("shared", "grad"))


@params(CASES)
def test_listed_heads_rotations_and_sums_match_the_calls(case, trio):
    prepared, _, _ = trio()
    attention = registry.operations()["attention"]
    with torch.inference_mode():
        listed_specifications = specifications(prepared)
        registry.forget_choices()
        prepared(**inputs.arguments(case, prepared))
    listed = {constant(spec) for operation, _, spec in listed_specifications if operation == "attention"}
    called = {constant(spec) for spec in attention.calls}
    assert called and called <= listed
    calls = {call_fields(name, spec) for name in EXACT for spec in registry.operations()[name].calls}
    assert calls == {call_fields(operation, spec) for operation, _, spec in listed_specifications if operation in EXACT}
    assert case.overlay != "llama" or {operation for operation, *_ in calls} == set(EXACT)


@params([case for case in CASES if case.overlay in ("bloom", "mpnet", "mt5", "t5")])
def test_a_position_bias_is_a_mask(case, trio):
    prepared, _, _ = trio()
    listed = [
        spec for module in prepared.modules() for spec in of_attention(module, torch.float32, torch.device("cpu"))
    ]
    assert {AttentionSpec(*spec).mask for operation, _, spec in listed if operation == "attention"} == {torch.float32}
    assert {operation for operation, _, _ in listed} == {"attention"}


@params([case for case in CASES if case.overlay in SHORT])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_text_has_at_most_25_lines_after_generate(case, gradients, recorded, trio, monkeypatch):
    prepared, _, _ = trio()
    monkeypatch.setenv("COLUMNS", "80")
    with torch.inference_mode():
        prepared(**inputs.arguments(case, prepared))
        if case.kind in ("text", "seq2seq") and "generate" not in case.unsupported_by_stock:
            prepared.generate(inputs.tokens(2, 5), max_new_tokens=3, do_sample=False)
    state = known(prepared)
    if recorded and state is not None:
        names = [*registry.operations()]
        routes = {Route(name, "triton", "kernel", ()) for name in names}
        for name, value in {"routes": routes, "recorded": 9, "replayed": 99, "compared": 9, "calls": 9}.items():
            monkeypatch.setattr(state, name, value)
    with torch.set_grad_enabled(gradients):
        lines = str(hf_rocm.explain(prepared)).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= 80
