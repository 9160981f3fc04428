"""Loss and gradients in training are as accurate as stock's: every forward is differentiable or stays stock."""

from __future__ import annotations

import copy

import torch

from hf_rocm.overlay import bind
from hf_rocm.weights import patch_embeddings
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.hits import counted
from tests.coverage.perturbed import perturbed
from tests.tolerance import assert_run_as_good_as_eager


def objective(case, model):
    """A scalar that depends on every output."""
    result = model(**inputs.arguments(case, model))
    return sum(value.double().square().mean() for value in inputs.outputs(result).values())


def gradients(case, model):
    model = copy.deepcopy(model).train()
    with torch.enable_grad():
        loss = objective(case, model)
        loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach().to(next(model.parameters()).dtype), **named}


def rounded_once(case, exact):
    """Yield gradients in float64 of models whose weights are perturbed by up to the rounding error of fp32."""
    for model in perturbed(exact):
        with inputs.in_float64():
            yield gradients(case, model)


@params(CASES, without="training")
def test_loss_and_gradients_equal_stock(case, trio):
    prepared, stock, exact = trio()
    embedding = patch_embeddings.in_force(prepared)
    # tests/weights compares the gradients of patch embeddings.
    patch_embeddings.detach(prepared)
    try:
        with counted() as hits:
            actual = gradients(case, prepared)
    finally:
        patch_embeddings.attach(prepared, bind.ON)
    assert patch_embeddings.in_force(prepared) == embedding
    assert all(hits[name] for name in case.classes()), f"hf_rocm did not run while training: {dict(hits)}"
    same_dtype = gradients(case, stock)
    with inputs.in_float64():
        expected = gradients(case, exact)
    # errors are relative to the gradient's largest value, or to 0.1 % of the largest value of all gradients if that is
    # larger, because some gradients (such as that of a key's bias) are zero up to rounding
    rounded = rounded_once(case, exact)
    assert_run_as_good_as_eager(actual, same_dtype, expected, least=1e-3, rounded=rounded)
