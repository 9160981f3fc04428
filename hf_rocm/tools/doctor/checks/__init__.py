"""The checks in the order in which they are shown. A check is a function from facts to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hf_rocm.tools.doctor.checks.aiter import aiter
from hf_rocm.tools.doctor.checks.allocator import allocator
from hf_rocm.tools.doctor.checks.driver import driver
from hf_rocm.tools.doctor.checks.gpus import gpus, override, shared_memory
from hf_rocm.tools.doctor.checks.known import graph_events, known
from hf_rocm.tools.doctor.checks.model import model
from hf_rocm.tools.doctor.checks.options import options
from hf_rocm.tools.doctor.checks.packages import packages
from hf_rocm.tools.doctor.checks.rocm import rocm
from hf_rocm.tools.doctor.checks.several import several
from hf_rocm.tools.doctor.checks.system import system
from hf_rocm.tools.doctor.checks.torch import torch
from hf_rocm.tools.doctor.checks.torch_settings import torch_settings
from hf_rocm.tools.doctor.checks.transformers import transformers
from hf_rocm.tools.doctor.checks.triton import triton
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, warning

Check = Callable[[Facts], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    system,
    driver,
    rocm,
    gpus,
    override,
    shared_memory,
    torch,
    torch_settings,
    allocator,
    triton,
    aiter,
    transformers,
    options,
    packages,
    several,
    known,
    graph_events,
    model,
)


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings of all checks."""
    return tuple(finding for check in CHECKS for finding in _guarded(check, facts))


def _guarded(check: Check, facts: Facts) -> list[Finding]:
    try:
        return list(check(facts))
    except Exception as error:  # noqa: BLE001 - a bug in one check must not hide the findings of the others
        return [
            warning(
                check.__name__,
                f"this check itself failed: {type(error).__name__}: {error}",
                means="doctor could not examine this part of the machine; the other lines are valid",
                fix="report it with the output of `hf-rocm env`",
            )
        ]
