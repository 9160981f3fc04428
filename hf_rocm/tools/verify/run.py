"""Run all checks of verify on one model, in order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import __version__, options
from hf_rocm.arguments import require_module, require_paths, require_switches
from hf_rocm.device import describe, is_rocm
from hf_rocm.errors import VerifyError
from hf_rocm.loading.prepare import REPORT, prepare
from hf_rocm.overlay import bind
from hf_rocm.overlay.scan import WITHOUT_OVERLAY
from hf_rocm.tools.verify import golden as gold
from hf_rocm.tools.verify.cases import FILLED, PADDED, PROMPT, Case, cases
from hf_rocm.tools.verify.check import NOT_RUN, Check
from hf_rocm.tools.verify.fingerprint import fingerprint
from hf_rocm.tools.verify.generate import greedy_tokens, replay_against_uncaptured
from hf_rocm.tools.verify.model_under_test import Subject, device_name, prepare_again
from hf_rocm.tools.verify.padding import padding_changes_nothing
from hf_rocm.tools.verify.reference import Run
from hf_rocm.tools.verify.report import Verification
from hf_rocm.tools.verify.saving import restores_stock, saves_the_same, weights_kept
from hf_rocm.tools.verify.session import GOLDEN, Progress, Session
from hf_rocm.tools.verify.stock import stock_as_loaded
from hf_rocm.tools.verify.tiers import each_tier
from hf_rocm.tools.verify.training import NAME as TRAINING
from hf_rocm.tools.verify.training import TITLE as TRAINING_TITLE
from hf_rocm.tools.verify.training import loss_and_gradients


def verify(
    model: nn.Module,
    *,
    ids: Tensor | None = None,
    quick: bool = False,
    train: bool = False,
    force: bool | None = None,
    golden: str | PathLike[str] | None = None,
    save_golden: str | PathLike[str] | None = None,
    progress: Progress = lambda stage: None,
) -> Verification:
    """Compare hf_rocm with stock on this model, on the model's device and in its dtype.

    model: from transformers or `hf_rocm.from_pretrained`; its state is the same afterwards. ids: [S] int64 tokens of a
    text, at least 64; random tokens by default. quick: use fewer tokens and skip the check of saved files. train:
    compare the loss and the gradients too. force: as in `hf_rocm.prepare`. golden: a file to compare with. save_golden:
    a file to write. progress: a function that is called with the name of each stage. Returns a `Verification`. Raises
    `VerifyError` if there is nothing to verify, the model is not supported (for example, quantised), stock can't run
    the first case or ids are not valid, `GoldenError` if a file can't be used, and `OptionError` if model is not a
    `torch.nn.Module`, force is neither a bool nor None, or a file is not a path.
    """
    require_module(model, "verify")
    require_switches(force=force)
    require_paths(golden=golden, save_golden=save_golden)
    began = time.monotonic()
    subject = Subject(model)
    earlier_report = model.__dict__.get(REPORT)
    check_enabled(force=bool(force or (earlier_report or {}).get("forced")))
    ids = _tokens(subject, ids)
    if save_golden is not None:
        gold.check(Path(save_golden))
    # Read the file now, so that its errors are raised before any check runs.
    recorded = None if golden is None else gold.load(Path(golden), subject)
    with _restoring(model, earlier_report):
        before = fingerprint(model)
        if earlier_report is None:
            progress("preparing")
            prepare(model, force=force)
        _check_served(subject)
        session = Session(subject, progress)
        with _evaluating(model):
            session.add(weights_kept(subject, before))
            for name, case in cases(subject, ids, quick=quick).items():
                session.case(name, case)
            session.add(padding_changes_nothing(subject, session.known.get(PADDED)))
            session.add(stock_as_loaded(subject, session.known.get(PADDED)))
            progress("greedy tokens")
            session.add(greedy_tokens(subject, ids, new=32 if quick else 200))
            progress("graph replay")
            session.add(replay_against_uncaptured(subject, ids, new=16 if quick else 64))
            _on_one_row(session, before, quick=quick)
            if save_golden is not None:
                session.save(Path(save_golden))
            if recorded is not None:
                session.golden(recorded)
        if train:
            progress("training")
            session.add(loss_and_gradients(subject, ids))
        else:
            session.add(Check(TRAINING, TRAINING_TITLE, NOT_RUN, note="--train compares them"))
        progress("restoring")
        with _evaluating(model):
            prompt = session.known[PROMPT]
            session.add(restores_stock(subject, prompt.case, prompt.reference, before))
    return Verification(
        model=type(model).__name__,
        machine=_machine(subject),
        checks=tuple(session.checks),
        layers=session.layers,
        tiers=_served_by(session.known[PROMPT].free),
        seconds=round(time.monotonic() - began, 1),
    )


def enabled(*, force: bool) -> bool:
    """Return whether there is something to verify: the ROCm path is enabled or forced."""
    return force or options.force_requested() or is_rocm()


def check_enabled(*, force: bool, enabled_by: str = "force=True") -> None:
    """Raise `VerifyError` if there is nothing to verify, because the ROCm path is neither enabled nor forced.

    enabled_by: the option that forces the ROCm path, as it appears in the hint.
    """
    if not enabled(force=force):
        raise VerifyError(
            "there is nothing to verify: this PyTorch is not a ROCm build, and without ROCm hf_rocm changes nothing",
            hint=f"{enabled_by} verifies hf_rocm's path on PyTorch's own kernels",
        )


def record(
    model: nn.Module, file: str | PathLike[str], *, ids: Tensor | None = None, quick: bool = False
) -> dict[str, Any]:
    """Record a golden file from a stock model, on any machine. Returns the file's header.

    Raises `VerifyError` if the model is not supported, stock can't run a case or ids are not valid, and `GoldenError`
    if the file can't be written.
    """
    subject = Subject(model)
    with _evaluating(model):
        wanted = _golden_cases(cases(subject, _tokens(subject, ids), quick=quick))
        return gold.save(Path(file), subject, wanted)


def _on_one_row(session: Session, before: dict[str, str], *, quick: bool) -> None:
    """Run the checks that use one row: every tier, and saving."""
    subject = session.subject
    session.progress("tiers")
    row = session.known.get(FILLED, session.known[PROMPT])
    session.add(*each_tier(subject, row))
    session.progress("saving")
    prompt = session.known[PROMPT]
    session.add(saves_the_same(subject, prompt.case, prompt.free, quick=quick))


def _golden_cases(named: dict[str, Case | str]) -> dict[str, Case]:
    return {name: case for name in GOLDEN if isinstance(case := named[name], Case)}


def _tokens(subject: Subject, ids: Tensor | None) -> Tensor:
    """Return [S] tokens on the CPU: the user's, or random tokens that are the same in every run."""
    size = int(subject.text_config.vocab_size)
    if ids is None:
        length = min(256, int(getattr(subject.text_config, "max_position_embeddings", 256)) // 2)
        return torch.randint(min(3, size - 1), size, (max(16, length),), generator=torch.Generator().manual_seed(0))
    ids = ids.reshape(-1).cpu() if isinstance(ids, Tensor) else torch.empty(0)
    if len(ids) < 64 or ids.dtype != torch.long or not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise VerifyError(
            "ids must be at least 64 int64 tokens of this model's vocabulary",
            facts={"found": f"{len(ids)} tokens of dtype {ids.dtype}", "vocabulary": size},
        )
    return ids


def _check_served(subject: Subject) -> None:
    if any(bind.mode_of(module) != bind.OFF for module in subject.model.modules()):
        return
    report = subject.model.__dict__.get(REPORT) or {}
    refused = report.get("refused", {})
    reasons = "hf_rocm.explain(model) lists the reasons by layer"
    raise VerifyError(
        f"there is nothing to verify: no layer of {type(subject.model).__name__} is served by hf_rocm",
        facts=refused,
        hint=reasons if refused or report.get("overlays") else f"{reasons}; {WITHOUT_OVERLAY}",
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _restoring(model: nn.Module, report: dict[str, Any] | None) -> Iterator[None]:
    """Restore the model's state, prepared or stock, after the block, even after an error."""
    from hf_rocm.loading.prepare import restore

    modes = {module: module.__dict__[bind.MODE] for module in model.modules() if bind.MODE in module.__dict__}
    try:
        yield
    finally:
        restore(model)
        if report is not None:
            prepare_again(model, report)
        for module in model.modules():
            if bind.binding_of(module) is not None and report is None:
                bind.set_mode(module, modes.get(module))


def _served_by(free: Run) -> dict[str, str]:
    """Return operation → the tiers and kernels that served it, with the number of calls of each."""
    counts: dict[str, dict[str, int]] = {}
    for route in free.routes:
        kernels = counts.setdefault(route.operation, {})
        name = f"{route.tier}, {route.name}"
        kernels[name] = kernels.get(name, 0) + 1
    return {operation: "; ".join(_counted(kernels.items())) for operation, kernels in counts.items()}


def _counted(counts: Iterable[tuple[str, int]]) -> Iterator[str]:
    for name, count in counts:
        yield f"{name} × {count}"


def _machine(subject: Subject) -> dict[str, str]:
    import transformers

    device = describe(subject.device)
    name = device_name(subject.device)
    return {
        "device": f"{name} ({device.arch})" if device.arch else name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "reference": f"stock in {str(subject.wide).removeprefix('torch.')}",
        "versions": f"hf_rocm {__version__}, transformers {transformers.__version__}, torch {torch.__version__}, "
        f"ROCm {torch.version.hip or 'none'}",
    }
