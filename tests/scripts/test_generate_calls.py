"""scripts/bench --segment generate-calls: every measured call returns correct tokens."""

from __future__ import annotations

from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def test_every_call_is_measured_with_correct_tokens(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import generate_calls

    device = torch.device("cpu")
    result = list(generate_calls.measure(generate_calls.CALLS, device, rounds=1, progress=lambda text: None, tiny=True))
    assert [outcome.case for outcome in result] == [call.name for call in generate_calls.CALLS]
    assert all(outcome.wrong is None and len(outcome.stock) == len(outcome.prepared) == 1 for outcome in result)
