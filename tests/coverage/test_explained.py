"""The attention specifications that `explain` and `warmup` list include those of a model's calls."""

from __future__ import annotations

import torch

from hf_rocm.ops import registry
from hf_rocm.ops.specs.attention import AttentionSpec
from hf_rocm.tools.attention_specifications import of_attention
from hf_rocm.tools.specifications import specifications
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES

# Fields that do not depend on the tokens of a call.
CONSTANT = ("dtype", "heads", "kv_heads", "head_dim", "value_dim", "softcap", "sinks")


def constant(spec):
    return tuple(getattr(AttentionSpec(*spec), field) for field in CONSTANT)


@params(CASES)
def test_heads_are_those_of_the_calls(case, trio):
    prepared, _, _ = trio()
    attention = registry.operations()["attention"]
    with torch.inference_mode():
        listed = {constant(spec) for operation, _, spec in specifications(prepared) if operation == "attention"}
        registry.forget_choices()
        prepared(**inputs.arguments(case, prepared))
    called = {constant(spec) for spec in attention.calls}
    assert called and called <= listed


@params([case for case in CASES if case.overlay in ("bloom", "mpnet", "mt5", "t5")])
def test_a_position_bias_is_a_mask(case, trio):
    prepared, _, _ = trio()
    listed = [
        spec for module in prepared.modules() for spec in of_attention(module, torch.float32, torch.device("cpu"))
    ]
    assert {AttentionSpec(*spec).mask for operation, _, spec in listed if operation == "attention"} == {torch.float32}
    assert {operation for operation, _, _ in listed} == {"attention"}
