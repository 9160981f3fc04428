"""Refuse to record steps where replays of HIP graphs are known to be wrong, unless the user requires recording.

`hf_rocm.known_faults` lists the affected GPUs and ROCm releases.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from hf_rocm import known_faults
from hf_rocm.known_faults import GraphFault

_log = logging.getLogger("hf_rocm")


def refuses(device: Any, *, required: bool) -> str | None:
    """Return why no step is recorded on this torch device by default, or None.

    If recording is required, returns None, and logs a warning the first time that a fault is found.
    """
    fault = fault_of(device)
    if fault is None:
        return None
    if required:
        _warn(fault)
        return None
    return f"{reason(fault)}; HF_ROCM_GRAPHS=1 (graphs=True) records steps anyway"


def fault_of(device: Any) -> GraphFault | None:
    """The first graph fault that this device may have with this ROCm release, or None."""
    from hf_rocm.device import describe

    described = describe(device)
    faults = known_faults.graph_faults(described.arch, rocm_release()) if described.rocm else ()
    return faults[0] if faults else None


def reason(fault: GraphFault) -> str:
    return f"on {' and '.join(fault.gfx)} with {fault.releases}, {fault.what} ({fault.link})"


def rocm_release() -> str | None:
    """The ROCm release that torch was built for, or None without ROCm."""
    import torch

    return known_faults.rocm_release(
        rocm=getattr(torch.version, "rocm", None), torch=torch.__version__, hip=torch.version.hip
    )


@cache
def _warn(fault: GraphFault) -> None:
    _log.warning("steps are recorded because graphs are required, though %s", reason(fault))
