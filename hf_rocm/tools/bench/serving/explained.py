"""Runs in the server with hf_rocm: prepares the models that it loads, and writes `explain`'s text about steps on a
signal.
"""

from __future__ import annotations

import gc
import json
import signal
from pathlib import Path

from torch import nn

from hf_rocm import files


def begin(file: str) -> None:
    """Prepare every model that this process loads. On SIGUSR1, write `lines` to `file`."""
    from hf_rocm.loading.auto import auto_prepare

    auto_prepare(force=True)
    signal.signal(signal.SIGUSR1, lambda *_: files.write(Path(file), json.dumps(lines())))


def lines() -> list[str]:
    """The sentences of `explain` about batches and recorded steps, for each prepared model of this process."""
    from hf_rocm.loading.prepare import REPORT
    from hf_rocm.tools.explain import explain

    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    return [line for module in modules if REPORT in module.__dict__ for line in explain(module).decoding]
