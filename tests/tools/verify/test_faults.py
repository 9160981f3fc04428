"""Every injected fault is found, and its layer and operation are named."""

from __future__ import annotations

import pytest
import torch

import hf_rocm
from hf_rocm import ops
from hf_rocm.tools.verify import saving
from tests.generation.conftest import recorded_on_cpu
from tests.generation.emulator import Operators
from tests.tools.verify import faults
from tests.tools.verify.conftest import those_here

__all__ = ["recorded_on_cpu"]

ATTENTION = "self_attn.attention"


def faults_of(model, **arguments):
    """The failures by check."""
    found = hf_rocm.verify(model, force=True, quick=True, **arguments)
    assert not found.passed
    assert "checks failed" in " ".join(str(found).splitlines()[-4:])
    return {check.name: check.fault for check in found.checks if check.status == "failed"}


def test_a_wrong_weight_of_one_layer(build):
    model = faults.prepared(build("llama"))
    faults.wrong_block(model, "model.layers.1.mlp")
    found = faults_of(model)
    for check in ("prompt", "padded batch", "filled cache", "static cache"):
        assert (found[check].layer, found[check].operation, found[check].others) == (
            "model.layers.1", "mlp.up_proj", ())  # fmt: skip
    assert "weights" not in found  # the parameters themselves are unchanged


def test_a_stale_fused_weight(build, monkeypatch):
    """If memory is too small to examine all layers at once, they are examined one by one."""
    monkeypatch.setattr("hf_rocm.tools.verify.examine.ROOM", 1)
    model = faults.prepared(build("llama"))
    faults.stale_block(model, "model.layers.1.self_attn", monkeypatch)
    fault = faults_of(model)["prompt"]
    assert (fault.layer, fault.operation) == ("model.layers.1", "self_attn.q_proj")


@pytest.mark.parametrize(
    ("model", "operation", "call", "checks", "point"),
    those_here(
        ("llama", "attention", faults.top_left, {"filled cache", "static cache"}, ATTENTION),
        ("mistral", "attention", faults.one_key_less, {"sliding window"}, ATTENTION),
        ("gpt_oss", "attention", faults.without("sinks"), {"prompt", "sliding window"}, ATTENTION),
        ("gemma2", "attention", faults.without("softcap"), {"prompt", "sliding window"}, ATTENTION),
        ("qwen3", "rope", faults.first_rows_positions, {"padded batch"}, "self_attn.rotated query"),
    ),
)
def test_a_fault_of_a_kernel(model, operation, call, checks, point, build):
    """The fault is reported in the first layer, and independently in every other layer."""
    built = build(model)
    with faults.instead(operation, call):
        found = faults_of(built)
    for check in checks:
        fault = found[check]
        assert fault.layer == "model.layers.0" and fault.operation == point, str(fault)
        assert fault.error > 10 * fault.allowed
        assert f"model.layers.0: {point} is the first that differs" in str(fault)
    if model == "qwen3":  # with a single row, or rows of equal length, the positions are correct
        assert not {"prompt", "filled cache", "sliding window"} & set(found)
    # a layer with full attention and without softcap or sinks is correct
    assert found[next(iter(checks))].others in ((), ("model.layers.1",))


def test_weights_damaged_by_prepare(build, monkeypatch):
    from hf_rocm.weights import fuse

    honest = fuse._join

    def damaging(*args):
        held = honest(*args)
        with torch.no_grad():
            held.weight[0, 0] += 1e-3
        return held

    monkeypatch.setattr(fuse, "_join", damaging)
    found = faults_of(build("llama"))
    assert found["weights"].layer == "model.layers.0.self_attn.q_proj" and found["weights"].operation == "weight"
    assert found["restore"].layer == found["weights"].layer


def test_faults_in_gradients_only(build):
    """A backward that is wrong by a factor does not change the results of the forward."""

    def call(query, key, value, **terms):
        output, weights = faults.softmax(query, key, value, **terms)
        if value.requires_grad:
            output = output + 0.5 * (output - output.detach())
        return output, weights

    model = build("llama")
    with faults.instead("attention", call):
        found = faults_of(model, train=True)
    assert list(found) == ["training"]
    fault = found["training"]
    assert fault.layer == "model.layers.1" and "self_attn.v_proj" in fault.operation
    assert "mlp" not in fault.operation and "o_proj" not in fault.operation  # they precede it in the backward pass


def test_a_recording_that_becomes_stale(build, recorded_on_cpu, monkeypatch):
    """The first three replays are correct; later ones do nothing, so the logits of the third remain."""
    clean = hf_rocm.verify(build("llama"), force=True, quick=True)
    assert clean.passed, str(clean)
    check = clean.check("graph replay")
    assert check.status == "passed" and check.numbers["replayed"] > 20 and "steps replayed" in check.note
    honest = Operators.replay

    def stale(self):
        if self.replays < 3:
            honest(self)

    monkeypatch.setattr(Operators, "replay", stale)
    found = hf_rocm.verify(build("llama"), force=True, quick=True)
    assert not found.passed and found.check("greedy tokens").status == "passed"  # the calls were repeated
    check = found.check("graph replay")
    assert check.status == "failed" and "a replayed step differed from the step itself" in check.note
    assert check.note in " ".join(str(found).split())


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (lambda x, weight: ops.linear(x, weight), "still computes linear"),
        (lambda x, weight: torch.nn.functional.linear(x, weight * 1.01), "results differ from stock's"),
    ],
    ids=["operation", "results"],
)
def test_leftovers_of_restore(left, words, build, monkeypatch):
    restore = saving.restore

    def leaves_a_forward(model):
        head = restore(model).lm_head
        head.forward = lambda x: left(x, head.weight)

    monkeypatch.setattr(saving, "restore", leaves_a_forward)
    found = hf_rocm.verify(build("llama"), force=True, quick=True)
    (check,) = [each for each in found.checks if each.status == "failed"]
    assert check.name == "restore" and words in check.note
