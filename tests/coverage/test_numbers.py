"""Numbers of a module (its scale, its epsilon, a limit) are read from the module, as in stock transformers."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm.overlay import bind
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.perturbed import perturbed
from tests.coverage.routing import choosing
from tests.tolerance import assert_run_as_good_as_eager


def change(model, served):
    """Change the nonzero float attributes of the served modules, except dropout rates. Returns their names."""
    changed = set()
    for place, module in model.named_modules():
        if place not in served:
            continue
        for name, value in list(module.__dict__.items()):
            if type(value) is float and value and "dropout" not in name:
                module.__dict__[name] = value * 1.5
                changed.add(f"{type(module).__name__}.{name}")
    return changed


def served_in(model):
    return {place for place, module in model.named_modules() if bind.binding_of(module) is not None}


def errors_nearby(exact, run, expected):
    """Yield `expected` plus the errors of stock in fp32 with perturbed weights.

    The largest error of a single run can be small by chance, depending on the CPU.
    """
    for model in perturbed(exact):
        stock = model.float()
        with torch.inference_mode():
            actual = run(stock)
            with inputs.in_float64():
                reference = run(copy.deepcopy(stock).double())
        yield {part: value + (actual[part].double() - reference[part]) for part, value in expected.items()}


@params([case for case in CASES if not case.has_routed_experts()])
def test_a_changed_number_takes_effect(case):
    stock = case.build(torch.float32)
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    served = served_in(prepared)
    arguments = inputs.arguments(case, stock)
    with torch.inference_mode():
        before = inputs.outputs(stock(**arguments))
    if not change(stock, served):
        pytest.skip("its modules have no numbers")
    assert change(prepared, served)
    exact = copy.deepcopy(stock).double()

    def run(model):
        return inputs.outputs(model(**inputs.arguments(case, model)))

    with torch.inference_mode(), choosing(case):
        expected = run(stock)
        with inputs.in_float64():
            reference = run(exact)
        actual = run(prepared)
    nearby = errors_nearby(exact, run, reference)
    assert_run_as_good_as_eager(actual, expected, reference, rounded=nearby)
    if all(torch.equal(before[name], expected[name]) for name in expected):
        pytest.skip("stock reads none of the numbers of its modules")
