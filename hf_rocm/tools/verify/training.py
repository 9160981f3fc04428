"""Compare the loss and gradients with a CPU reference."""

from __future__ import annotations

import copy
import math
import statistics
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.loading.prepare import restore
from hf_rocm.tolerance import allowed_error
from hf_rocm.tools.verify.check import FAILED, NOT_RUN, PASSED, Check, Fault
from hf_rocm.tools.verify.measure import Difference, difference
from hf_rocm.tools.verify.model_under_test import PAIR, Subject
from hf_rocm.tools.verify.wide_reference import cast, computing_in

NAME, TITLE = "training", "loss and gradients compared with a CPU reference"


def loss_and_gradients(subject: Subject, ids: Tensor) -> Check:
    """Compare one row's loss and the gradients of all floating-point parameters with stock on the CPU.

    The reference is a copy on the CPU in fp32, or in fp64 for an fp32 model. The bound is derived from the error of a
    second copy, in the model's dtype. The two copies don't exist at the same time.
    """
    if subject.kind == PAIR or "logits" not in _output_names(subject):
        return Check(NAME, TITLE, NOT_RUN, note="verify has no loss for this type of model")
    ids = ids[None, :32]
    exact = _reference(subject, ids, subject.wide)
    eager = _reference(subject, ids, subject.dtype)
    actual = _gradients(subject.model, ids.to(subject.device), subject.kind)
    step = torch.finfo(subject.dtype).eps
    loss, bound = abs(actual[0] - exact[0]), allowed_error(abs(eager[0] - exact[0]), subject.dtype, abs(exact[0]))
    numbers = {"loss": actual[0], "loss_reference": exact[0], "loss_error": loss, "loss_allowed": bound}
    names = list(exact[1])
    errors, usual = _differences(actual[1], exact[1], step), _differences(eager[1], exact[1], step)
    median = statistics.median(error.typical for error in usual.values())
    limit = {name: allowed_error(max(usual[name].typical, median), subject.dtype) for name in names}
    wrong = [name for name in names if not errors[name].finite or errors[name].typical > limit[name]]
    numbers["parameters"] = float(len(names))
    fault = None
    if wrong:
        fault = _fault_of(subject, wrong, errors, limit)
    elif not loss <= bound:
        fault = Fault("loss", "the value", loss, bound)
    worst = max(names, key=lambda name: errors[name].typical if errors[name].finite else math.inf)
    note = f"loss {actual[0]:.6g}, reference {exact[0]:.6g}; {len(names)} gradients; {worst} has the largest error"
    status = PASSED if fault is None else FAILED
    return Check(NAME, TITLE, status, errors[worst].typical, limit[worst], numbers, note, fault)


def _fault_of(subject: Subject, wrong: list[str], errors: dict[str, Difference], limit: dict[str, float]) -> Fault:
    """Return the fault in the last wrong layer, from which the backward pass propagates the error to earlier layers."""

    def layer_of(name: str) -> str:
        return next((block for block in subject.blocks if name.startswith(f"{block}.")), name.rpartition(".")[0])

    layer = layer_of(wrong[-1])
    inside = [name for name in wrong if layer_of(name) == layer]
    names = [name.removeprefix(f"{layer}.").removesuffix(".weight") for name in inside]
    worst = max(inside, key=lambda name: errors[name].typical if errors[name].finite else math.inf)
    return Fault(layer, f"gradient of {', '.join(names)}", errors[worst].typical, limit[worst])


def _reference(subject: Subject, ids: Tensor, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    with subject.stock():
        stock: Any = restore(copy.deepcopy(subject.model))
        stock.to("cpu")
    cast(stock, dtype)
    with computing_in(dtype) if dtype == subject.wide else nullcontext():
        return _gradients(stock, ids, subject.kind)


def _gradients(model: Any, ids: Tensor, kind: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and the gradients on the CPU by parameter. The model's own gradients remain unchanged."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    before = {name: (parameter.grad, parameter.requires_grad) for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
            parameter.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():
            options = {} if kind == "encoder" else {"use_cache": False}
            logits = model(input_ids=ids, **options).logits
            shifted = (logits[:, :-1], ids[:, 1:]) if kind == "decoder" else (logits, ids)
            loss = nn.functional.cross_entropy(shifted[0].flatten(0, 1).to(_loss_dtype(logits)), shifted[1].flatten())
            loss.backward()
        gradients = {
            name: parameter.grad.detach().cpu() for name, parameter in parameters.items() if parameter.grad is not None
        }
        return loss.detach().item(), gradients
    finally:
        for name, parameter in parameters.items():
            parameter.grad, required = before[name]
            parameter.requires_grad_(required)


def _differences(actual: dict[str, Tensor], expected: dict[str, Tensor], step: float) -> dict[str, Difference]:
    """Map parameters to the differences of their gradients, each compared as one vector.

    The difference is relative to the gradient's norm. A gradient that is only rounding error, such as a key bias's, has
    no meaningful norm, so the median norm is used.
    """
    sizes = {name: value.double().norm().item() for name, value in expected.items()}
    usual = statistics.median(sizes.values())
    differences = {}
    for name, value in expected.items():
        if name not in actual:
            differences[name] = Difference(False, *[math.nan] * 5)
            continue
        error = difference(actual[name].reshape(1, -1), value.reshape(1, -1))
        factor = sizes[name] / usual if sizes[name] < step * usual else 1.0
        differences[name] = replace(error, worst=error.worst * factor, typical=error.typical * factor)
    return differences


def _loss_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _output_names(subject: Subject) -> str:
    with subject.stock(), torch.no_grad():
        return " ".join(subject.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=subject.device)).keys())
