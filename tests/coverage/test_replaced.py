"""A replaced rotary function is called in every model that has one.

hf_rocm serves the model again once the original is restored.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers

import hf_rocm
from hf_rocm.layers.fallback_reasons import noted
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.hits import counted
from tests.coverage.routing import choosing
from tests.replacing import replaced, scaled

MODELS = Path(transformers.__file__).parent / "models"


def rotary_functions(case):
    """The names of the rotary functions that a model's file defines and calls."""
    if not case.applies:
        return []
    text = (MODELS / case.overlay / f"modeling_{case.overlay}.py").read_text(encoding="utf-8")
    return [name for name in re.findall(r"^def (apply_\w*rot\w*)\(", text, re.M) if text.count(f"{name}(") > 1]


ROTARY = [case for case in CASES if rotary_functions(case)]


def test_models_whose_overlays_import_their_rotary_function_are_included():
    named = [
        "cohere",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "glm",
        "glm4",
        "gpt_oss",
        "helium",
        "llama4",
        "phimoe",
        "qwen2_vl",
    ]
    applicable = {case.overlay for case in CASES if case.applies}
    assert {case.overlay for case in ROTARY} >= applicable.intersection(named)


@params(ROTARY)
def test_a_replaced_rotary_function_is_called(case, trio):
    prepared, stock, _ = trio()
    namespace = vars(sys.modules[f"transformers.models.{case.overlay}.modeling_{case.overlay}"])

    def run(model):
        with torch.inference_mode():
            return inputs.outputs(model(**inputs.arguments(case, model)))

    with choosing(case) as stock_choices:
        before = run(stock)
    with ExitStack() as stack:
        for name in rotary_functions(case):
            stack.enter_context(replaced(namespace, name, scaled))
        with choosing(case) as replaced_choices:
            expected = run(stock)
        assert any(not torch.equal(before[name], expected[name]) for name in before), (
            "the replacement did not change the result"
        )
        with choosing(case, replaced_choices), counted() as hits:
            actual = run(prepared)
        parts = {part.cls for part in hf_rocm.explain(prepared).parts if part.stock_because is not None}
        assert parts and parts <= set(case.classes())
        for module in prepared.modules():
            name = type(module).__name__
            assert name not in parts or not hits[name] or noted(module) is not None, "stock did not run"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with choosing(case, stock_choices), counted() as hits:
        run(prepared)
    assert all(hits[name] for name in parts), "a class is not served again"
