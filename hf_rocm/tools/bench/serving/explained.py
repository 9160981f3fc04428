"""Code that runs in the server with hf_rocm.

It prepares the models that the server loads and, on a signal, writes `explain`'s sentences about decoding.
"""

from __future__ import annotations

import gc
import json
import signal
from pathlib import Path

from torch import nn

from hf_rocm import files


def begin(file: str) -> None:
    """Prepare every model that this process loads. On SIGUSR1, which Windows lacks, write `lines()` to `file`."""
    from hf_rocm.loading.auto import auto_prepare

    auto_prepare(force=True)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, lambda *_: files.write(Path(file), json.dumps(lines())))


def lines() -> list[str]:
    """Return `explain`'s sentences about batches and recorded steps, for every prepared model in this process."""
    from hf_rocm.loading.prepare import REPORT
    from hf_rocm.tools.explain import explain

    modules = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    return [line for module in modules if REPORT in module.__dict__ for line in explain(module).decoding]
