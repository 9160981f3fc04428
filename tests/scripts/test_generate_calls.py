"""scripts/bench --segment generate-calls: every call is measured with correct tokens."""

from __future__ import annotations

from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def test_every_call_is_measured_with_correct_tokens(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import generate_calls

    device = torch.device("cpu")
    found = list(generate_calls.measure(generate_calls.CALLS, device, rounds=1, progress=lambda text: None, tiny=True))
    assert [each.case for each in found] == [call.name for call in generate_calls.CALLS]
    assert all(each.wrong is None and len(each.stock) == len(each.ours) == 1 for each in found)
