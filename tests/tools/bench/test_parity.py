"""No speed is reported for wrong results: correct results pass the check, and errors on any side are detected."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import ops
from hf_rocm.tools.bench import measure, parity, variants
from hf_rocm.tools.bench.cases import Case
from tests.tools.bench.conftest import RATES

DECODE, PREFILL = Case("decode", 2, 12, 4), Case("prefill", 2, 12)


def run(model, names, case, **changes):
    reference = parity.Reference(model)
    sides, _ = variants.sides(model, names, encoder=False)
    result = measure.Measurement(model, sides, reference, RATES, 2, lambda text: None)
    return measure.measure(result._replace(**changes), case)


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_correct_results_pass_and_are_recorded(case, model):
    result = run(model, ["stock", "hf_rocm"], case)
    assert [timing.side for timing in result.timings] == ["stock", "hf_rocm"] and not result.left_out
    for timing in result.timings:
        assert timing.parity is not None and 0 < timing.parity.error <= timing.parity.allowed
        assert timing.parity.allowed >= 2 * timing.parity.eager


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_wrong_results_of_hf_rocm_end_the_run(case, model, monkeypatch):
    with ops.recording() as routes:
        run(model, ["hf_rocm"], case)
    # The fault below affects this operation.
    assert {entry.operation for entry in routes} >= {"rms_norm"}
    hf_rocm.restore(model)
    spoil(monkeypatch, 1e-3)
    with pytest.raises(measure.Mismatch, match="hf_rocm returns wrong results") as error:
        run(model, ["stock", "hf_rocm"], case)
    assert error.value.facts["case"] == case.title


def test_a_rounding_error_is_not_a_mismatch(model, monkeypatch):
    spoil(monkeypatch, 1e-9)
    assert len(run(model, ["hf_rocm"], PREFILL).timings) == 1


def spoil(monkeypatch, error):
    """Scale the results of hf_rocm's norm, which stock does not call."""
    from hf_rocm.ops import pointwise, registry

    correct = pointwise.torch_rms_norm
    operation = registry.operations()["rms_norm"]
    for implementation in operation.implementations:
        monkeypatch.setitem(implementation.__dict__, "call", lambda *args: correct(*args) * (1 + error))
    # Clear the cached choices.
    monkeypatch.setattr(operation, "calls", registry.Table(operation._call))


def test_another_side_with_wrong_results_is_skipped(model):
    reference = parity.Reference(model)
    sides, _ = variants.sides(model, ["stock", "hf_rocm"], encoder=False)
    stock = sides[0].model
    stock.model.norm.weight = torch.nn.Parameter(stock.model.norm.weight * 1.01)
    result = measure.Measurement(model, sides, reference, RATES, 1, lambda text: None)
    done = measure.measure(result, PREFILL)
    assert [timing.side for timing in done.timings] == ["hf_rocm"]
    assert "its results are wrong by" in done.left_out["stock"]


def test_nonfinite_results_are_refused():
    exact = torch.ones(1, 3, dtype=torch.float64)
    eager = exact.float()
    assert parity.compare(eager, eager, exact).refusal is None
    assert parity.compare(eager * float("nan"), eager, exact).refusal is not None


def test_the_tolerance_is_that_of_the_tests():
    from tests.tolerance import allowed_error

    exact = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eager = exact.to(torch.bfloat16)
    assert parity.compare(eager, eager, exact).allowed == allowed_error(eager, exact)


def test_the_reference_has_higher_precision_and_keeps_the_model_unchanged(model):
    before = dict(model.named_parameters())
    with torch.no_grad():
        narrow = model(input_ids=torch.arange(20, 30)[None]).logits
        with parity.widened(model) as wide:
            exact = model(input_ids=torch.arange(20, 30)[None]).logits
    assert wide == exact.dtype == torch.float64 and narrow.dtype == torch.float32
    assert 0 < (exact - narrow).abs().max() < 1e-4
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is value for name, value in before.items())
    assert not model.model.norm._forward_hooks and not model.model.norm._forward_pre_hooks


def test_the_in_place_reference_equals_that_of_a_copy_and_keeps_the_model_unchanged(model):
    before = {id(config): dict(vars(config)) for config, _ in parity._implementations(model)}
    (side,), _ = variants.sides(model, ["stock"], encoder=False)
    trial = parity.trial(side, DECODE, most=8)
    assert trial.arguments["input_ids"].shape == (2, 8 + 4 - 1) and not trial.same
    assert trial.tokens.shape == (2, 8 + 4)
    assert parity.ReferenceInPlace(model).judge(trial) == parity.Reference(model).judge(trial)
    assert {id(config): dict(vars(config)) for config, _ in parity._implementations(model)} == before
    assert model.config._attn_implementation != "eager"


def test_the_error_of_two_logits_is_measured_on_more_inputs():
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=32, num_labels=2
    )
    shares = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = transformers.ViTForImageClassification(config).eval()
        reference = parity.Reference(model)
        (side,), _ = variants.sides(model, ["hf_rocm"], encoder=True)
        judged = reference.judge(parity.trial(side, Case("encode", 1, 0)))
        shares.append(judged.error / judged.allowed)
    assert max(shares) <= 1
