"""Check that preparing changes no weight, and leaves no trace in saved files or in a restored model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_rocm.loading.prepare import restore
from hf_rocm.tools.verify.cases import Case
from hf_rocm.tools.verify.check import FAILED, NOT_RUN, PASSED, Check, Fault
from hf_rocm.tools.verify.fingerprint import checksum, differing, fingerprint
from hf_rocm.tools.verify.judge import end_to_end, finals
from hf_rocm.tools.verify.measure import difference
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.reference import Reference, Run, run

WEIGHTS = "weights", "bit-identical before and after preparing"
SAVED = "save_pretrained", "the same tensors as stock in the saved files, and unchanged results afterwards"
RESTORED = "restore", "stock again: weights, modules and results"


def weights_kept(subject: Subject, before: dict[str, str]) -> Check:
    """Compare the prepared model's state dict with `before`, the checksums at the start of the verification."""
    return _same(*WEIGHTS, differing(before, fingerprint(subject.model)), len(before))


def saves_the_same(subject: Subject, case: Case, before: Run, *, quick: bool) -> Check:
    """Save the prepared and the stock model, compare the saved tensors, and run the prepared model again.

    before: a run of the prepared model before saving, whose results the later run must repeat.
    """
    if quick:
        return Check(*SAVED, NOT_RUN, note="left out by --quick")
    size = sum(value.nbytes for value in subject.model.state_dict().values() if isinstance(value, torch.Tensor))
    with tempfile.TemporaryDirectory(prefix="hf_rocm-verify-") as folder:
        free = shutil.disk_usage(folder).free
        if free < 1.2 * size:
            parent = tempfile.gettempdir()
            note = f"saving needs {1.2 * size / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free in {parent}"
            return Check(*SAVED, NOT_RUN, note=f"{note}; set TMPDIR to another folder")
        actual = _saved(subject.model, Path(folder))
        after = run(subject, case, subject.dtype)
        with subject.stock():
            expected = _saved(subject.model, Path(folder))
    check = _same(*SAVED, differing(expected, actual), len(expected))
    changes = [difference(a, b) for a, b in zip(after.finals, before.finals, strict=True)]
    if check.status == PASSED and any(change.worst or not change.finite for change in changes):
        return Check(*SAVED, FAILED, note="saving changed the results of later calls")
    return check


def restores_stock(subject: Subject, case: Case, reference: Reference, before: dict[str, str]) -> Check:
    """Restore the model in place, and compare it with stock. before: as in `weights_kept`."""
    names = list(subject.model.state_dict())
    restore(subject.model)
    check = _same(*RESTORED, differing(before, fingerprint(subject.model)), len(names))
    leftovers = [
        f"{path}.{key}"
        for path, module in subject.model.named_modules()
        for key in vars(module)
        if key.startswith("_hf_rocm_") and key != "_hf_rocm_mode"
    ]
    if leftovers:
        return Check(*RESTORED, FAILED, note=f"restore left {leftovers[0]} behind")
    with subject.stock():
        rerun = run(subject, case, subject.dtype)
    if rerun.routes:
        return Check(*RESTORED, FAILED, note=f"after restore hf_rocm still computes {rerun.routes[0].operation}")
    exact, eager, restored = finals(reference.wide, reference.eager, rerun)
    # not compared bitwise: the last bit may depend on a weight's address, and GPU kernels may be nondeterministic
    measured, bound = end_to_end(subject, difference(restored, eager), difference(eager, exact))
    if bound.exceeded(measured):
        note = "the restored model's results differ from stock's"
        return Check(*RESTORED, FAILED, measured.worst, bound.worst, note=note)
    return check


def _same(name: str, title: str, different: list[str], count: int) -> Check:
    if not different:
        return Check(name, title, PASSED, 0.0, 0.0, note=f"{count} tensors, bit for bit")
    layer, _, operation = different[0].rpartition(".")
    return Check(name, title, FAILED, note=f"{len(different)} of {count} tensors differ: {', '.join(different[:3])}",
                 fault=Fault(layer, operation, float(len(different)), 0.0))  # fmt: skip


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers within the block."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _saved(model: Any, folder: Path) -> dict[str, str]:
    """Save the model, return the checksums of the tensors in the files, and delete the files."""
    from safetensors import safe_open

    target = folder / "model"
    with _no_progress_bars():
        model.save_pretrained(target)
    checksums: dict[str, str] = {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            checksums |= {name: checksum(opened.get_tensor(name)) for name in names}
    shutil.rmtree(target)
    return checksums
