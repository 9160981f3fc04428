"""scripts/bench --segment serving: both sides run, their tokens are compared, and a slower hf_rocm is a failure."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_rocm import ops
from tests.serving.batching import RELEASE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(RELEASE.release < (5, 9), reason="not run: this release has no paged flash attention")


@pytest.fixture
def lib(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import serving

    return serving


def test_the_stock_side_is_unchanged_and_the_other_side_runs_flash_attention(lib):
    load = replace(lib.SMALL, requests=3, new=4)
    with ops.recording() as routes:
        outcome = lib.measure(torch.device("cpu"), load, lambda side: routes.clear() if side == "stock" else None)
    assert {route.operation for route in routes if "attention" in route.operation} == {"varlen_attention"}
    assert outcome.same == 1.0 and not outcome.wrong and outcome.prepared.tokens == 12
    assert "flash_attention_2" in outcome.prepared.detail and "times stock" in lib.table(outcome)


def test_wrong_tokens_are_detected(lib, monkeypatch):
    from hf_rocm.layers import flash_functions

    stock = flash_functions.flash_attn_varlen_func
    monkeypatch.setattr(ops, "varlen_attention", lambda *a, **k: -torch.ones_like(a[0]))
    outcome = lib.measure(torch.device("cpu"), replace(lib.SMALL, requests=3, new=4), lambda side: None)
    assert outcome.wrong and "WRONG" in lib.table(outcome)
    assert flash_functions.flash_attn_varlen_func is stock


@pytest.mark.parametrize(("rate", "code"), [(2.0, 0), (0.5, 1)])
def test_the_command_fails_if_hf_rocm_is_slower(lib, rate, code, monkeypatch, capsys):
    sides = (lib.Side("stock", 1.0, 10, 0.0, ""), lib.Side("hf_rocm", 1 / rate, 10, 0.0, ""))
    monkeypatch.setattr(lib, "measure", lambda *arguments: lib.Outcome(*sides, same=1.0, spread=1.0))
    main = runpy.run_path(str(ROOT / "scripts" / "bench"))["main"]
    monkeypatch.setattr("sys.argv", ["bench", "--segment", "serving", "--device", "cpu"])
    assert main() == code
    assert f"{rate:.2f} times stock" in capsys.readouterr().out
