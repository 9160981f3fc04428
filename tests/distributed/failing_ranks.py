"""Load a checkpoint on two ranks with a fault: the ranks differ, the load is refused, or a rank fails or is missing.

test_failures.py runs this script. Arguments: the fault, a checkpoint, and a folder that only one rank adds to its
import path, for the faults `overlays` and `aiter`. Each rank prints the time at which it begins to load, and `loaded`
afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

FAULT, CHECKPOINT, EXTRA = sys.argv[1:]
RANK = int(os.environ["RANK"])
SECOND = RANK == 1

if (FAULT == "overlays" and SECOND) or (FAULT == "aiter" and not SECOND):
    sys.path.insert(0, EXTRA)

import torch  # noqa: E402 - sys.path must be changed before these imports
import transformers  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import hf_rocm  # noqa: E402
from hf_rocm.distributed import facts  # noqa: E402

transformers.logging.set_verbosity_error()


def report(kind, error, trace):
    """Write the error in one call, because the ranks share stderr and Python writes a traceback in pieces."""
    os.write(2, "".join(traceback.format_exception(kind, error, trace)).encode())


sys.excepthook = report


def die(*arguments, **options):
    print("dying", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def broken():
    raise ValueError("this node's driver does not respond")


if SECOND and FAULT == "killed":
    PreTrainedModel._load_pretrained_model = die
if SECOND and FAULT == "raises":
    facts.aiter_facts = broken
if SECOND and FAULT == "overlays":
    assert Path(hf_rocm.__file__).is_relative_to(EXTRA)

print("loading", time.time(), flush=True)
dtype = torch.float64 if SECOND and FAULT == "dtype" else torch.float32
hf_rocm.from_pretrained(CHECKPOINT, tp_plan="auto", force=True, dtype=dtype)
print("loaded", flush=True)
