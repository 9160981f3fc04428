"""The checks: each a function from facts to findings, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hf_rocm.diagnostics.doctor.checks.aiter import aiter
from hf_rocm.diagnostics.doctor.checks.allocator import allocator
from hf_rocm.diagnostics.doctor.checks.driver import driver
from hf_rocm.diagnostics.doctor.checks.gpus import gpus, override
from hf_rocm.diagnostics.doctor.checks.model import model
from hf_rocm.diagnostics.doctor.checks.options import options
from hf_rocm.diagnostics.doctor.checks.packages import packages
from hf_rocm.diagnostics.doctor.checks.rocm import rocm
from hf_rocm.diagnostics.doctor.checks.several import several
from hf_rocm.diagnostics.doctor.checks.system import system
from hf_rocm.diagnostics.doctor.checks.torch import torch
from hf_rocm.diagnostics.doctor.checks.torch_settings import torch_settings
from hf_rocm.diagnostics.doctor.checks.transformers import transformers
from hf_rocm.diagnostics.doctor.checks.triton import triton
from hf_rocm.diagnostics.doctor.facts import Facts
from hf_rocm.diagnostics.doctor.report import Finding, warning

Check = Callable[[Facts], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    system,
    driver,
    rocm,
    gpus,
    override,
    torch,
    torch_settings,
    allocator,
    triton,
    aiter,
    transformers,
    options,
    packages,
    several,
    model,
)


def findings(facts: Facts) -> tuple[Finding, ...]:
    """What every check says of these facts."""
    return tuple(each for check in CHECKS for each in _guarded(check, facts))


def _guarded(check: Check, facts: Facts) -> list[Finding]:
    try:
        return list(check(facts))
    except Exception as error:  # noqa: BLE001 - a mistake in one check must not hide what the others found
        return [
            warning(
                check.__name__,
                f"this check failed by itself: {type(error).__name__}: {error}",
                means="doctor could not judge this part of the machine; the other lines hold",
                fix="report it with the output of `hf-rocm env`",
            )
        ]
