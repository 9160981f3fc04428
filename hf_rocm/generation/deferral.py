"""Whether a call is finished is asked one step late, so that the host never waits for the step it has just queued.

transformers reads after each step whether every row has ended. The device finishes that step, the host is told, and
only then does it queue the next: the device stands idle meanwhile. Asked a step late, the answer is there already.
The price is one step more when all rows end early, whose tokens are taken off again; what is returned is the same.

From 5.17 on transformers can do this itself, and does on one kind of device. Before, its loop asks
`_has_unfinished_sequences`, where we answer. Only where nobody sees the extra step: greedy decoding (drawing once more
would move the random generator on), with processors and criteria that are transformers' own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Where a step runs while the host goes on.
devices = {"cuda"}

_thread = threading.local()


class Late:
    """The stop check of one call. undone: steps that came too many."""

    def __init__(self, device: torch.device, length: int, longest: int) -> None:
        self._length = length
        self._longest = longest
        self._flags = [_Flag(device), _Flag(device)]
        self._asked = 0
        self.undone = 0

    def goes_on(self, finished: Tensor) -> bool:
        """Whether there is another step, by what was known a step ago. finished: bool, on the device."""
        flag, before = self._flags if self._asked % 2 else self._flags[::-1]
        flag.send(finished)
        self._asked += 1
        self._length += 1
        if self._asked > 1 and before.read():
            self.undone = 1
            return False
        return self._length < self._longest


class _Flag:
    """A bit on its way to the host."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._bit = torch.zeros((), dtype=torch.bool, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None

    def send(self, bit: Tensor) -> None:
        self._bit.copy_(bit, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def read(self) -> bool:
        if self._sent is not None:
            self._sent.synchronize()
        return bool(self._bit)


@contextmanager
def stopping_late(input_ids: Tensor, call: Mapping[str, Any]) -> Iterator[Late | None]:
    """Within, this thread's call of `_sample` asks late, if nobody would see it.

    input_ids: [B, S]. call: the keyword arguments of `_sample`.
    """
    longest = getattr(call.get("stopping_criteria"), "max_length", None)
    late = None
    if longest is not None and _unseen(input_ids, call):
        late = Late(input_ids.device, input_ids.shape[1], longest)
        _teach_transformers()
    outer, _thread.late = current(), late  # a call within a call has a check of its own, or none
    try:
        yield late
    finally:
        _thread.late = outer


@contextmanager
def stopping_as_ever() -> Iterator[None]:
    """Within, nothing is asked late: a call that is made from within another one."""
    outer, _thread.late = current(), None
    try:
        yield
    finally:
        _thread.late = outer


def current() -> Late | None:
    """The stop check of this thread's call, if it asks late."""
    return getattr(_thread, "late", None)


def _unseen(input_ids: Tensor, call: Mapping[str, Any]) -> bool:
    if input_ids.device.type not in devices or call.get("synced_gpus"):
        return False
    if call["generation_config"].do_sample:
        return False
    if call.get("streamer") is not None and not _transformers_own():
        return False  # it is handed each token before the question: that waits for the device anyway
    steps = [*call.get("logits_processor", ()), *call["stopping_criteria"]]
    # users' own may count their calls; transformers' don't, nor does the clock of our benchmark
    return all(type(each).__module__.split(".")[0] in ("transformers", "hf_rocm") for each in steps)


def _transformers_own() -> Any:
    """Its class for this, from 5.17 on."""
    from transformers.generation import utils

    return getattr(utils, "DeferredStopCheck", None)


def _teach_transformers() -> None:
    """Have transformers' own late check serve the calls that we defer; once."""
    check = _transformers_own()
    if check is None or hasattr(check.is_supported, _OURS):
        return
    stock = check.is_supported

    def is_supported(*args: Any, **kwargs: Any) -> bool:
        return current() is not None or bool(stock(*args, **kwargs))

    setattr(is_supported, _OURS, stock)
    check.is_supported = staticmethod(is_supported)


_OURS = "__hf_rocm_stock__"
