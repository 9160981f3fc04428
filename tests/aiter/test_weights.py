"""Routed layers and shuffled weights with the real aiter package: kernels and refusals."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_rocm import ops, options
from tests.aiter.test_models import PROMPT, build
from tests.tolerance import assert_as_good_as_eager

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kernels", "mi300x")

LAYERS = 2


def logits(model):
    with torch.no_grad():
        return model(PROMPT, use_cache=False).logits


@pytest.mark.parametrize("backend", ["auto", "aiter"])
def test_every_gemm_of_a_routed_model_runs_in_aiter(backend):
    import hf_rocm

    model = build("Llama")
    wide = copy.deepcopy(model).double()
    with options.override(tier="eager"):
        eager = logits(model)
    hf_rocm.prepare(model, force=True, linear_backend=backend)
    try:
        with options.override(probe=False), ops.recording() as routes:
            actual = logits(model)
        assert_as_good_as_eager(actual, eager, logits(wide))
        gemms = [route for route in routes if route.operation == "linear"]
        assert {(route.tier, route.name) for route in gemms} == {("aiter", "gemm_a16w16")}
        # Each layer has four GEMMs: the two groups, o_proj, and down_proj. lm_head is one more GEMM.
        assert len(gemms) == 4 * LAYERS + 1
        with options.override(probe=False):
            assert f"routed × {7 * LAYERS + 1}: {backend}" in hf_rocm.explain(model).details()
    finally:
        hf_rocm.restore(model)


def test_a_release_that_ignores_shuffling_gets_no_shuffled_weight():
    """The release on PyPI would read a shuffled weight as a plain one."""
    import hf_rocm

    model = build("Llama")
    with options.override(probe=False, preshuffle_threshold=0):
        hf_rocm.prepare(model, force=True, preshuffle="all", budget=1.0)
    try:
        report = model.__dict__["_hf_rocm_report"]["preshuffle"]
        assert not report["shuffled"] and report["bytes"] == 0
        assert all("does not check whether a weight is shuffled" in reason for reason in report["skipped"].values())
        assert "not shuffled × 9: amd-aiter" in hf_rocm.explain(model).details()
    finally:
        hf_rocm.restore(model)
