"""Every injected fault is detected, and its layer and operation are named."""

from __future__ import annotations

import pytest
import torch

import hf_rocm
from hf_rocm import ops
from hf_rocm.tools.verify import saving
from tests.generation.conftest import recorded_on_cpu
from tests.generation.emulator import Operators
from tests.tools.verify import faults
from tests.tools.verify.conftest import available

__all__ = ["recorded_on_cpu"]

ATTENTION = "self_attn.attention"


def faults_of(model, **arguments):
    """Returns the faults of failed checks by the check's name."""
    report = hf_rocm.verify(model, force=True, quick=True, **arguments)
    assert not report.passed
    assert "checks failed" in " ".join(str(report).splitlines()[-4:])
    return {check.name: check.fault for check in report.checks if check.status == "failed"}


def test_a_wrong_weight_of_one_layer_is_located(build):
    model = faults.prepared(build("llama"))
    faults.wrong_block(model, "model.layers.1.mlp")
    report = faults_of(model)
    for check in ("prompt", "padded batch", "filled cache", "static cache"):
        assert (report[check].layer, report[check].operation, report[check].others) == (
            "model.layers.1", "mlp.up_proj", ())  # fmt: skip
    # The parameters themselves are unchanged.
    assert "weights" not in report


def test_a_stale_fused_weight_is_located(build, monkeypatch):
    """If there is too little memory to examine all layers at once, they are examined one by one."""
    monkeypatch.setattr("hf_rocm.tools.verify.examine.ROOM", 1)
    model = faults.prepared(build("llama"))
    faults.stale_block(model, "model.layers.1.self_attn", monkeypatch)
    fault = faults_of(model)["prompt"]
    assert (fault.layer, fault.operation) == ("model.layers.1", "self_attn.q_proj")


@pytest.mark.parametrize(
    ("model", "operation", "call", "checks", "point"),
    available(
        ("llama", "attention", faults.top_left, {"filled cache", "static cache"}, ATTENTION),
        ("mistral", "attention", faults.one_key_fewer, {"sliding window"}, ATTENTION),
        ("gpt_oss", "attention", faults.without("sinks"), {"prompt", "sliding window"}, ATTENTION),
        ("gemma2", "attention", faults.without("softcap"), {"prompt", "sliding window"}, ATTENTION),
        ("qwen3", "rope", faults.first_rows_positions, {"padded batch"}, "self_attn.rotated query"),
    ),
)
def test_a_kernel_fault_is_located(model, operation, call, checks, point, build):
    """The fault is reported in the first layer, and separately in every other layer that has it."""
    built = build(model)
    with faults.replaced(operation, call):
        report = faults_of(built)
    for check in checks:
        fault = report[check]
        assert fault.layer == "model.layers.0" and fault.operation == point, str(fault)
        assert fault.error > 10 * fault.allowed
        assert f"model.layers.0: {point} is the first error above its bound" in str(fault)
    # With a single row, or rows of equal length, the positions are correct.
    if model == "qwen3":
        assert not {"prompt", "filled cache", "sliding window"} & set(report)
    # the second layer is correct if the fault does not affect its kind of attention
    assert report[next(iter(checks))].others in ((), ("model.layers.1",))


def test_weights_damaged_by_prepare_are_located(build, monkeypatch):
    from hf_rocm.weights import fuse

    original = fuse._join

    def damaging(*args):
        kept = original(*args)
        with torch.no_grad():
            kept.weight[0, 0] += 1e-3
        return kept

    monkeypatch.setattr(fuse, "_join", damaging)
    report = faults_of(build("llama"))
    assert report["weights"].layer == "model.layers.0.self_attn.q_proj" and report["weights"].operation == "weight"
    assert report["restore"].layer == report["weights"].layer


def test_a_fault_in_gradients_only_is_located(build):
    """A backward pass that is wrong by a factor does not change the results of the forward pass."""

    def call(query, key, value, **terms):
        output, weights = faults.softmax(query, key, value, **terms)
        if value.requires_grad:
            output = output + 0.5 * (output - output.detach())
        return output, weights

    model = build("llama")
    with faults.replaced("attention", call):
        report = faults_of(model, train=True)
    assert list(report) == ["training"]
    fault = report["training"]
    assert fault.layer == "model.layers.1" and "self_attn.v_proj" in fault.operation
    # these parts come earlier in the backward pass, so their gradients are correct
    assert "mlp" not in fault.operation and "o_proj" not in fault.operation


def test_a_recording_that_becomes_stale_is_detected(build, recorded_on_cpu, monkeypatch):
    """The first three replays are correct. Later ones do nothing, so the logits of the third remain."""
    clean = hf_rocm.verify(build("llama"), force=True, quick=True)
    assert clean.passed, str(clean)
    check = clean.check("graph replay")
    assert check.status == "passed" and check.numbers["replayed"] > 20 and "steps replayed" in check.note
    original = Operators.replay

    def stale(self):
        if self.replays < 3:
            original(self)

    monkeypatch.setattr(Operators, "replay", stale)
    report = hf_rocm.verify(build("llama"), force=True, quick=True)
    # The affected calls were repeated.
    assert not report.passed and report.check("greedy tokens").status == "passed"
    check = report.check("graph replay")
    assert check.status == "failed" and "a replayed step differed from the step itself" in check.note
    assert check.note in " ".join(str(report).split())


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (lambda x, weight: ops.linear(x, weight), "still computes linear"),
        (lambda x, weight: torch.nn.functional.linear(x, weight * 1.01), "results differ from stock's"),
    ],
    ids=["operation", "results"],
)
def test_leftovers_of_restore_are_detected(left, words, build, monkeypatch):
    restore = saving.restore

    def leaves_a_forward(model):
        head = restore(model).lm_head
        head.forward = lambda x: left(x, head.weight)

    monkeypatch.setattr(saving, "restore", leaves_a_forward)
    report = hf_rocm.verify(build("llama"), force=True, quick=True)
    (check,) = [outcome for outcome in report.checks if outcome.status == "failed"]
    assert check.name == "restore" and words in check.note
