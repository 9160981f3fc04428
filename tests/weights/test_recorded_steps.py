"""Decode steps that were recorded with shuffled weights: writes to the weights take effect in the next call."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.generation import recorder
from hf_rocm.generation.state import known
from tests.aiter import recorded
from tests.generation.emulator import EmulatedRecorder
from tests.weights import shuffling
from tests.weights.models import IDS


@pytest.mark.parametrize("threshold", [0, 1], ids=["in place", "a copy"])
def test_a_write_between_two_calls_takes_effect(threshold, machine, monkeypatch):
    monkeypatch.setitem(recorder.factories, "cpu", EmulatedRecorder)
    machine(threshold=threshold)
    model = shuffling.prepared()

    def tokens():
        del recorded.kernels.CALLS[:]
        with torch.no_grad():
            return model.generate(IDS, max_new_tokens=10, do_sample=False, eos_token_id=None)

    before = [tokens() for _ in range(2)]
    assert torch.equal(*before)
    state = known(model)
    replayed = state.replayed
    assert torch.equal(before[0], tokens())
    assert state.disabled is None and state.replayed == replayed + 9
    with torch.no_grad():
        for linear in (model.model.layers[0].self_attn.v_proj, model.model.layers[1].mlp.down_proj):
            linear.weight.copy_(linear.weight * -3)
    after = [tokens() for _ in range(2)]
    with monkeypatch.context() as nothing_recorded:
        nothing_recorded.delitem(recorder.factories, "cpu")
        assert torch.equal(after[0], tokens())
    assert torch.equal(*after) and not torch.equal(before[0], after[0])
