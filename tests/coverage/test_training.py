"""Loss and gradients in training mode are stock's: our forwards are differentiable, or step aside."""

from __future__ import annotations

import copy

import torch

from hf_rocm.overlay import bind
from hf_rocm.weights import patch_embeddings
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.hits import counted
from tests.tolerance import assert_run_as_good_as_eager


def objective(case, model):
    """A scalar that every output takes part in."""
    result = model(**inputs.arguments(case, model))
    return sum(value.double().square().mean() for value in inputs.outputs(result).values())


def gradients(case, model):
    model = copy.deepcopy(model).train()
    with torch.enable_grad():
        loss = objective(case, model)
        loss.backward()
    named = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach().to(next(model.parameters()).dtype), **named}


def rounded_once(case, exact, *, times=4):
    """Gradients in float64 with weights that differ from the real ones as rounding to fp32 makes them differ."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(times):
        model = copy.deepcopy(exact)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = 2 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 1
                parameter.mul_(1 + noise * torch.finfo(torch.float32).eps / 2)
        with inputs.in_float64():
            yield gradients(case, model)


@params(CASES, without="training")
def test_loss_and_gradients(case, trio):
    ours, stock, exact = trio()
    embedding = patch_embeddings.in_force(ours)
    patch_embeddings.detach(ours)  # tests/weights compares its gradients: here sums in another order would decide
    try:
        with counted() as hits:
            actual = gradients(case, ours)
    finally:
        patch_embeddings.attach(ours, bind.ON)
    assert patch_embeddings.in_force(ours) == embedding
    assert all(hits[name] for name in case.classes()), f"ours did not run while training: {dict(hits)}"
    same_dtype = gradients(case, stock)
    with inputs.in_float64():
        expected = gradients(case, exact)
    # gradients span decades; what is zero but for rounding (a key's bias) is no decade of its own
    rounded = rounded_once(case, exact)
    assert_run_as_good_as_eager(actual, same_dtype, expected, least=1e-3, rounded=rounded)
