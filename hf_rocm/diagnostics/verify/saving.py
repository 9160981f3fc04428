"""What preparing leaves behind: nothing in saved files, nothing in a restored model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_rocm.diagnostics.verify.cases import Case
from hf_rocm.diagnostics.verify.fingerprint import checksum, differing, fingerprint
from hf_rocm.diagnostics.verify.judge import end_to_end, finals
from hf_rocm.diagnostics.verify.measure import difference
from hf_rocm.diagnostics.verify.reference import Reference, Run, run
from hf_rocm.diagnostics.verify.report import FAILED, NOT_RUN, PASSED, Check, Fault
from hf_rocm.diagnostics.verify.subject import Subject
from hf_rocm.weights.prepare import restore

WEIGHTS = "weights", "the same bits before and after preparing"
SAVED = "save_pretrained", "files like stock's, and the same results after it"
RESTORED = "restore", "stock again: weights, modules and results"


def weights_kept(subject: Subject, before: dict[str, str]) -> Check:
    """The prepared model's state dict beside what it was. before: its checksums."""
    return _same(*WEIGHTS, differing(before, fingerprint(subject.model)), len(before))


def saves_the_same(subject: Subject, case: Case, before: Run, *, quick: bool) -> Check:
    """Save the prepared model and a stock one, and run again. before: a run of `case` before saving."""
    if quick:
        return Check(*SAVED, NOT_RUN, note="left out by --quick")
    size = sum(each.nbytes for each in subject.model.state_dict().values() if isinstance(each, torch.Tensor))
    with tempfile.TemporaryDirectory(prefix="hf_rocm-verify-") as folder:
        free = shutil.disk_usage(folder).free
        if free < 1.2 * size:
            note = f"a copy takes {size / 2**30:.1f} GiB, and {free / 2**30:.1f} are free in {tempfile.gettempdir()}"
            return Check(*SAVED, NOT_RUN, note=f"{note}; TMPDIR names another place")
        ours = _saved(subject.model, Path(folder))
        after = run(subject, case, subject.dtype)
        with subject.stock():
            theirs = _saved(subject.model, Path(folder))
    check = _same(*SAVED, differing(theirs, ours), len(theirs))
    moved = [difference(a, b) for a, b in zip(after.finals, before.finals, strict=True)]
    if check.status == PASSED and any(each.worst or not each.finite for each in moved):
        return Check(*SAVED, FAILED, note="saving changed the results that follow it")
    return check


def comes_back(subject: Subject, case: Case, reference: Reference, before: dict[str, str]) -> Check:
    """Restore the model, in place, and compare it with stock. before: checksums."""
    names = list(subject.model.state_dict())
    restore(subject.model)
    check = _same(*RESTORED, differing(before, fingerprint(subject.model)), len(names))
    left = [
        f"{path}.{key}"
        for path, module in subject.model.named_modules()
        for key in vars(module)
        if key.startswith("_hf_rocm_") and key != "_hf_rocm_mode"
    ]
    if left:
        return Check(*RESTORED, FAILED, note=f"restore left {left[0]} behind")
    with subject.stock():
        again = run(subject, case, subject.dtype)
    if again.routes:
        return Check(*RESTORED, FAILED, note=f"after restore hf_rocm still computes {again.routes[0].operation}")
    exact, eager, found = finals(reference.wide, reference.eager, again)
    # no bits: a product's last one may depend on where a weight lies, and a GPU isn't always the same twice
    off, bound = end_to_end(subject, difference(found, eager), difference(eager, exact))
    if bound.exceeded(off):
        note = "the restored model's results are not what stock's were"
        return Check(*RESTORED, FAILED, off.worst, bound.worst, note=note)
    return check


def _same(name: str, title: str, different: list[str], count: int) -> Check:
    if not different:
        return Check(name, title, PASSED, 0.0, 0.0, note=f"{count} tensors, bit for bit")
    layer, _, operation = different[0].rpartition(".")
    return Check(name, title, FAILED, note=f"{len(different)} of {count} tensors differ: {', '.join(different[:3])}",
                 fault=Fault(layer, operation, float(len(different)), 0.0))  # fmt: skip


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' own progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _saved(model: Any, folder: Path) -> dict[str, str]:
    """Save, take the checksums of what the files hold, and delete them."""
    from safetensors import safe_open

    target = folder / "model"
    with _quietly():
        model.save_pretrained(target)
    found: dict[str, str] = {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: checksum(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    shutil.rmtree(target)
    return found
