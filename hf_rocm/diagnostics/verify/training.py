"""Loss and gradients beside a CPU reference."""

from __future__ import annotations

import copy
import math
import statistics
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.diagnostics.verify.measure import Difference, difference
from hf_rocm.diagnostics.verify.report import FAILED, NOT_RUN, PASSED, Check, Fault
from hf_rocm.diagnostics.verify.subject import PAIR, Subject
from hf_rocm.diagnostics.verify.wide import cast, computing_in
from hf_rocm.weights.prepare import restore

NAME, TITLE = "training", "loss and gradients beside a CPU reference"


def loss_and_gradients(subject: Subject, ids: Tensor) -> Check:
    """One row's loss and every parameter's gradient, held to stock in fp32 on the CPU (fp64 for an fp32 model).

    The reference is a copy in host memory, and so is stock's own dtype's, one after the other. How far ours may be off
    comes from that second one.
    """
    if subject.kind == PAIR or "logits" not in _returns(subject):
        return Check(NAME, TITLE, NOT_RUN, note="verify knows no loss of this model")
    ids = ids[None, :32]
    exact = _reference(subject, ids, subject.wide)
    eager = _reference(subject, ids, subject.dtype)
    ours = _gradients(subject.model, ids.to(subject.device), subject.kind)
    step = torch.finfo(subject.dtype).eps
    loss, bound = abs(ours[0] - exact[0]), 2 * abs(eager[0] - exact[0]) + step * abs(exact[0])
    numbers = {"loss": ours[0], "loss_reference": exact[0], "loss_error": loss, "loss_allowed": bound}
    places = list(exact[1])
    found, usual = _apart(ours[1], exact[1], step), _apart(eager[1], exact[1], step)
    median = statistics.median(each.typical for each in usual.values())
    limit = {name: 2 * max(usual[name].typical, median) + step for name in places}
    wrong = [name for name in places if not found[name].finite or found[name].typical > limit[name]]
    numbers["parameters"] = float(len(places))
    fault = None
    if wrong:
        fault = _where(subject, wrong, found, limit)
    elif not loss <= bound:
        fault = Fault("loss", "its value", loss, bound)
    worst = max(places, key=lambda name: found[name].typical if found[name].finite else math.inf)
    note = f"loss {ours[0]:.6g}, reference {exact[0]:.6g}; {len(places)} gradients, {worst} is furthest off"
    status = PASSED if fault is None else FAILED
    return Check(NAME, TITLE, status, found[worst].typical, limit[worst], numbers, note, fault)


def _where(subject: Subject, wrong: list[str], found: dict[str, Difference], limit: dict[str, float]) -> Fault:
    """Gradients come from the end: the last layer that is wrong is where it began."""

    def layer_of(name: str) -> str:
        return next((each for each in subject.blocks if name.startswith(f"{each}.")), name.rpartition(".")[0])

    layer = layer_of(wrong[-1])
    inside = [name for name in wrong if layer_of(name) == layer]
    names = [name.removeprefix(f"{layer}.").removesuffix(".weight") for name in inside]
    worst = max(inside, key=lambda name: found[name].typical if found[name].finite else math.inf)
    return Fault(layer, f"gradient of {', '.join(names)}", found[worst].typical, limit[worst])


def _reference(subject: Subject, ids: Tensor, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    with subject.stock():
        stock: Any = restore(copy.deepcopy(subject.model))
        stock.to("cpu")
    cast(stock, dtype)
    with computing_in(dtype) if dtype == subject.wide else nullcontext():
        return _gradients(stock, ids, subject.kind)


def _gradients(model: Any, ids: Tensor, kind: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and each parameter's gradient, on the CPU; the model's own gradients stay as they were."""
    parameters = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    kept = {name: (each.grad, each.requires_grad) for name, each in parameters.items()}
    try:
        for each in parameters.values():
            each.grad = None
            each.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():
            further = {} if kind == "encoder" else {"use_cache": False}
            logits = model(input_ids=ids, **further).logits
            shifted = (logits[:, :-1], ids[:, 1:]) if kind == "decoder" else (logits, ids)
            loss = nn.functional.cross_entropy(shifted[0].flatten(0, 1).to(_at_least(logits)), shifted[1].flatten())
            loss.backward()
        found = {name: each.grad.detach().cpu() for name, each in parameters.items() if each.grad is not None}
        return loss.detach().item(), found
    finally:
        for name, each in parameters.items():
            each.grad, requires = kept[name]
            each.requires_grad_(requires)


def _apart(actual: dict[str, Tensor], expected: dict[str, Tensor], step: float) -> dict[str, Difference]:
    """By parameter: its gradient as one vector. One that is nothing but rounding (a key's bias) has no own size."""
    sizes = {name: value.double().norm().item() for name, value in expected.items()}
    usual = statistics.median(sizes.values())
    found = {}
    for name, value in expected.items():
        if name not in actual:
            found[name] = Difference(False, *[math.nan] * 5)
            continue
        each = difference(actual[name].reshape(1, -1), value.reshape(1, -1))
        shrink = sizes[name] / usual if sizes[name] < step * usual else 1.0
        found[name] = replace(each, worst=each.worst * shrink, typical=each.typical * shrink)
    return found


def _at_least(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _returns(subject: Subject) -> str:
    with subject.stock(), torch.no_grad():
        return " ".join(subject.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=subject.device)).keys())
