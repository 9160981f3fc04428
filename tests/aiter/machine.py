"""Simulate an AMD GPU on the CPU, for tests of the predicates that decide whether a call is served."""

from __future__ import annotations

import pytest

from hf_rocm.device import Device
from hf_rocm.ops import registry


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str | None) -> None:
    monkeypatch.setattr(registry, "describe", lambda device: Device("cuda", rocm=True, arch=arch))
    registry.forget_choices()
