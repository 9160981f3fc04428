"""Read a value on the host while the device runs a replay that was queued first.

Reading a value makes the host wait for the value's stream. If the value is computed after a replay in the same stream,
the host waits for the replay. If the replay is queued after the read, the device waits for the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_rocm.generation.streams import separate_stream

# The context to use if no replay was queued.
NOTHING_LATER: AbstractContextManager[None] = nullcontext()


def before_replay(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which work on the device waits only for the work queued so far in the current stream.

    The context can be entered several times. Only the host may use the results of the work, because no other stream
    waits for the work.
    """
    return _Before(device) if device.type == "cuda" else NOTHING_LATER


class _Before(AbstractContextManager[None]):
    def __init__(self, device: torch.device) -> None:
        self._reached = torch.cuda.current_stream(device).record_event()
        stream = _streams.get(device)
        if stream is None:
            stream = _streams.setdefault(device, separate_stream(device))
        self._stream = stream
        self._entered: Any = None

    def __enter__(self) -> None:
        self._stream.wait_event(self._reached)
        self._entered = torch.cuda.stream(self._stream)
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)


_streams: dict[torch.device, Any] = {}
