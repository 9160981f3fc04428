"""Check that a row in a padded batch has the same result as the row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm.tools.verify.cases import Case, Step
from hf_rocm.tools.verify.check import FAILED, NOT_RUN, PASSED, Check
from hf_rocm.tools.verify.examine import Examined
from hf_rocm.tools.verify.judge import end_to_end
from hf_rocm.tools.verify.measure import difference
from hf_rocm.tools.verify.model_under_test import PAIR, Subject
from hf_rocm.tools.verify.reference import Run, run

NAME, TITLE = "padding", "rows of a padded batch compared with the same rows alone"


def padding_changes_nothing(subject: Subject, batch: Examined | None) -> Check:
    """Compare hf_rocm on a batch with the reference on every row alone.

    The bound is derived from stock's error on the batch.
    """
    if batch is None or subject.kind == PAIR:
        return Check(NAME, TITLE, NOT_RUN, note="no padded batch was run, or the model is an encoder-decoder model")
    step, reference, free = batch.case.steps[0], batch.reference, batch.free
    assert step.mask is not None
    with subject.reference():
        single_rows = [_single_row(subject, ids, mask.bool()) for ids, mask in zip(step.ids, step.mask, strict=True)]
    exact = torch.cat(
        [rows[keep[mask.bool()]] for rows, mask, keep in zip(single_rows, step.mask, step.keep, strict=True)]
    )
    stock, actual = (difference(batched.finals[0].flatten(1), exact) for batched in (reference.eager, free))
    measured, bound = end_to_end(subject, actual, stock)
    status = FAILED if bound.exceeded(measured) else PASSED
    note = "" if status == PASSED else "a row's result in the batch differs from its result alone"
    return Check(NAME, TITLE, status, measured.worst, bound.worst, note=note)


def _single_row(subject: Subject, ids: Tensor, real: Tensor) -> Tensor:
    """Return the final output for one row's real tokens, [S, V]."""
    row = ids[real][None]
    case = Case("alone", (Step(row),))
    result: Run = run(subject, Case(case.name, case.steps), subject.wide)
    return result.finals[0].flatten(1)
