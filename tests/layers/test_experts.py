"""Calls through transformers' experts interface that hf_rocm serves or refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_rocm.layers import experts

pytest.importorskip("transformers.integrations.moe", reason="not run: this transformers has no experts interface")


@pytest.mark.parametrize(
    ("most", "pairs", "served"), [(32, 32, True), (32, 34, False), (64, 64, True), (64, 66, False)]
)
def test_batched_experts_of_generate_are_served_for_few_pairs(most, pairs, served, monkeypatch):
    monkeypatch.setattr(experts, "max_pairs", lambda x: most)
    reason = interface_reason("batched_mm", torch.device("meta"), pairs)
    assert (reason is None) is served
    assert served or "for a few tokens" in str(reason)


def test_batched_experts_stay_stock_on_a_cpu():
    assert "batched_mm" in str(interface_reason("batched_mm", torch.device("cpu"), 2))


def test_grouped_experts_are_served_for_any_number_of_pairs():
    assert interface_reason("grouped_mm", torch.device("cpu"), 2) is None
    assert interface_reason("grouped_mm", torch.device("meta"), 4096) is None


def test_other_implementations_stay_stock():
    assert "only 'grouped_mm' and 'batched_mm' are served" in str(interface_reason("eager", torch.device("meta"), 2))


def interface_reason(implementation: str, device: torch.device, pairs: int) -> str | None:
    module = SimpleNamespace(config=SimpleNamespace(_experts_implementation=implementation))
    tokens = pairs // 2
    x, ids = torch.empty(tokens, 8, device=device), torch.empty(tokens, 2, dtype=torch.int64, device=device)
    return experts._interface_reason(module, x, ids)
