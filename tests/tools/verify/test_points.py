"""Observing a run does not change it, and the names of intermediate results are the same as in stock transformers."""

from __future__ import annotations

import torch

from hf_rocm import ops
from hf_rocm.tools.verify.cases import Case, Step
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.points import OUTPUT
from hf_rocm.tools.verify.reference import reference_of, run
from tests.coverage.inputs import tokens
from tests.tools.verify import faults

LAYER = "model.layers.0"
FUSED = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
ROTATED = {"self_attn.rotated query", "self_attn.rotated key"}


def test_observing_does_not_change_the_route(build):
    model = faults.prepared(build("llama"))
    case = Case("prompt", (Step(tokens(1, 9)),))
    subject = Subject(model)
    with torch.no_grad(), ops.recording() as routes:
        expected = model(input_ids=tokens(1, 9)).logits
    watched = run(subject, case, subject.dtype, inside=set(subject.blocks))
    assert watched.routes == routes and {"attention", "linear", "rope"} <= {route.operation for route in routes}
    assert torch.equal(watched.finals[0], expected[0])
    points = watched.points[0][LAYER]
    assert points.keys() >= FUSED | ROTATED | {"self_attn.attention", OUTPUT}


def test_stock_has_the_same_points_and_runs_no_hf_rocm_kernel(build):
    model = faults.prepared(build("llama"))
    subject = Subject(model)
    with ops.recording() as routes:
        result = reference_of(subject, Case("prompt", (Step(tokens(1, 9)),)), {LAYER})
    assert routes == []
    names = list(result.eager.points[0][LAYER])
    assert set(names) >= FUSED | ROTATED | {"in self_attn.o_proj", "in mlp.down_proj", OUTPUT}
    # q_proj's input is the norm's output, which has a name.
    assert "in self_attn.q_proj" not in names
    order = ["self_attn.q_proj", "self_attn.rotated key", "in self_attn.o_proj", "mlp.up_proj", "in mlp.down_proj"]
    assert [name for name in names if name in order] == order and names[-1] == OUTPUT
    assert list(result.eager.points[0]["model.layers.1"]) == [OUTPUT]
    assert result.local.points[0][LAYER][OUTPUT].dtype == torch.float64
