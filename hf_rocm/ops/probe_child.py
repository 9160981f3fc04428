"""The child process that builds and checks kernels. `probe_worker` starts it; no module of hf_rocm imports it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable

import torch

# This import registers every operation.
import hf_rocm.ops
from hf_rocm.ops import probe_cases
from hf_rocm.ops.probe_worker import decode

# The child exits after this time without a request.
IDLE_SECONDS = 60.0
# Seconds after the time-out until a hanging child ends itself.
GRACE = 30
# The largest argument of `signal.alarm`, in seconds.
LONGEST = 2**31 - 1
# Seconds until a child that hangs during initialisation ends itself.
WAKING = 120


def serve(*, warm: bool) -> None:
    """Serve requests, one per line on stdin. Writes a line when a request has been read, and a line with the result.

    A line may also request the initialisation of a device; nothing is written in reply. warm: whether to initialise
    Triton before the first request. Returns after `IDLE_SECONDS` without a request, or when stdin is closed.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Kernels and compilers may print to stdout.
    os.dup2(2, 1)
    assert hf_rocm.ops
    if warm:
        _in_time(_wake)
    requests = os.fdopen(0, "rb", buffering=0, closefd=False)
    while select.select([requests], [], [], IDLE_SECONDS)[0]:
        line = requests.readline()
        if not line:
            break
        request = json.loads(line)
        if "wake" in request:
            _in_time(_wake_on, request["wake"])
            continue
        replies.write("{}\n")
        replies.flush()
        kind = decode(request["kind"])
        _alarm(request["timeout"])
        reason = probe_cases.check(request["operation"], request["tier"], request["name"], kind)
        signal.alarm(0)
        replies.write(json.dumps({"reason": reason}) + "\n")
        replies.flush()


def _alarm(timeout: float) -> None:
    """Set an alarm that ends this child after its parent would have killed it, in case the parent no longer exists."""
    signal.alarm(int(min(timeout + GRACE, LONGEST)))


def _in_time(step: Callable[..., None], *args: str) -> None:
    signal.alarm(WAKING)
    step(*args)
    signal.alarm(0)


def _wake() -> None:
    """Initialise Triton's driver and compiler before the first check. Uses no GPU memory."""
    # A check that needs them reports the error.
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            from triton.runtime import driver

            from hf_rocm.ops.triton.builds import compiled_for
            from hf_rocm.ops.triton.kernels.norm import BUILDS

            compiled_for(BUILDS[0], driver.active.get_current_target())


def _wake_on(device: str) -> None:
    """Initialise the context and the BLAS library of a GPU. This takes some of its memory."""
    with contextlib.suppress(Exception):
        ones = torch.ones(16, 16, dtype=torch.float64, device=device)
        torch.mm(ones, ones).sum().item()
