"""Kernels run with their tensors' device as the current device."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hf_rocm.ops import custom_op


@pytest.mark.parametrize(
    ("several", "index", "switched"), [(False, 1, []), (True, 0, []), (True, 1, [1]), (True, None, [])]
)
def test_the_device_is_switched_only_if_it_differs(monkeypatch, several, index, switched):
    entered = []

    @contextmanager
    def device(requested):
        entered.append(requested.index)
        yield

    monkeypatch.setattr(custom_op, "several_devices", lambda: several)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor = SimpleNamespace(device=SimpleNamespace(index=index))
    assert custom_op.on_its_device(lambda first, second: second)(tensor, 5) == 5
    assert entered == switched


def test_several_devices_are_detected():
    assert custom_op.several_devices() is (torch.cuda.is_available() and torch.cuda.device_count() > 1)
