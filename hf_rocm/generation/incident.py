"""Record wrong replays in the ledger, with the machine, the versions and the model."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import torch

from hf_rocm.architectures import driver_version
from hf_rocm.device import describe
from hf_rocm.generation import ledger
from hf_rocm.generation.suspects import rocm_release


def keep(model: Any, *, reason: str, operators: int, replays: int, unproven: int) -> None:
    """Record a wrong replay of a step or a forward of this model. The other arguments are fields of `ledger.Event`."""
    import transformers

    from hf_rocm import __version__

    ledger.record(
        ledger.Event(
            when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            gpu=_gpu(model.device),
            rocm=rocm_release(),
            driver=driver_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            hf_rocm=__version__,
            model=type(model).__name__,
            checkpoint=str(getattr(model.config, "_name_or_path", "") or ""),
            operators=operators,
            replays=replays,
            unproven=unproven,
            reason=reason,
        )
    )


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device.type)
    arch = describe(device).arch
    return torch.cuda.get_device_name(device) + (f" ({arch})" if arch else "")
