"""Check stock as it was loaded against eager stock, since attention implementations and Hub kernels can be wrong too.

The other checks compare hf_rocm with stock under eager attention. Without hf_rocm, and in layers that stay stock, the
model runs as it was loaded, for example with another attention implementation or a rotary kernel from the Hub.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm.tools.verify.cases import Case, Step
from hf_rocm.tools.verify.check import FAILED, NOT_RUN, PASSED, Check
from hf_rocm.tools.verify.examine import Examined
from hf_rocm.tools.verify.judge import end_to_end
from hf_rocm.tools.verify.measure import Difference, difference
from hf_rocm.tools.verify.model_under_test import DECODER, Subject
from hf_rocm.tools.verify.reference import run

NAME, TITLE = "stock", "stock as loaded on a padded batch, compared with eager stock on single rows"


def stock_as_loaded(subject: Subject, batch: Examined | None) -> Check:
    """Check the rows of a padded batch in stock's own forwards, in the model's dtype.

    The reference runs every row alone, with eager attention and in the wider dtype, so that other rows, padding and
    attention kernels have no effect. The bound is twice the error of the same computation in the model's dtype, plus a
    rounding step.
    """
    if batch is None or subject.kind != DECODER:
        return Check(NAME, TITLE, NOT_RUN, note="no padded batch was run, or the model has no causal attention")
    step = _shortest_first(batch.case.steps[0])
    with subject.reference():
        exact = _single_row_logits(subject, step, subject.wide)
    with subject.stock():
        plain = difference(_single_row_logits(subject, step, subject.dtype), exact)
    try:
        with subject.stock(plain=False):
            batched = difference(_batched_logits(subject, step), exact)
            single = difference(_single_row_logits(subject, step, subject.dtype), exact)
    except Exception as error:  # noqa: BLE001 - any failure of stock is reported
        return Check(NAME, TITLE, NOT_RUN, note=f"stock as loaded fails: {' '.join(str(error).split())[:160]}")
    measured, bound = end_to_end(subject, batched, plain)
    if not bound.exceeded(measured):
        return Check(NAME, TITLE, PASSED, measured.worst, bound.worst)
    single_measured, _ = end_to_end(subject, single, plain)
    note = _reason_of(subject, batched, single_is_wrong=bound.exceeded(single_measured))
    return Check(NAME, TITLE, FAILED, measured.worst, bound.worst, note=note)


def _reason_of(subject: Subject, batched: Difference, *, single_is_wrong: bool) -> str:
    name = getattr(subject.text_config, "_attn_implementation", None) or "its own"
    if single_is_wrong:
        return f"stock is wrong even without padding: attention {name!r} differs from eager (does it drop sinks?)"
    if not batched.finite:
        return f"stock's results are not finite with padding: attention {name!r} computes rows without a visible key"
    return "stock is wrong only with padding: rows use the positions of other rows (a rotary kernel?), or read padding"


def _shortest_first(step: Step) -> Step:
    """Return the same rows with the shortest one first.

    Otherwise, the error of a kernel that uses the first row's positions for all rows would not be detected: it would
    only shift the positions of padded rows, and attention does not depend on such a shift.
    """
    assert step.mask is not None
    order = step.mask.sum(-1).argsort()
    positions = None if step.positions is None else step.positions[order]
    return Step(step.ids[order], step.mask[order], positions)


def _batched_logits(subject: Subject, step: Step) -> Tensor:
    """Return the logits [N, V] of the compared tokens, with all rows in one batch and `generate`'s position ids."""
    return run(subject, Case(NAME, (step,), "dynamic"), subject.dtype).finals[0].flatten(1)


def _single_row_logits(subject: Subject, step: Step, dtype: torch.dtype) -> Tensor:
    """Return the logits [N, V] of the same tokens, with every row run alone and without its padding."""
    assert step.mask is not None
    rows = []
    for ids, mask, keep in zip(step.ids, step.mask.bool(), step.keep, strict=True):
        row = run(subject, Case(NAME, (Step(ids[mask][None]),), "dynamic"), dtype).finals[0].flatten(1)
        rows.append(row[keep[mask][-len(row) :]])
    return torch.cat(rows)
