"""Check torch, aiter and other packages in a child process, since a check may crash, hang or write to the terminal.

The process is started as `python -m hf_rocm.tools.doctor.child TASK FILE`. It rewrites the file before and after
every stage, so that the stage in which it was killed is known.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hf_rocm.tools.doctor import kernels

MIB = 2**20
# Some of aiter's functions that hf_rocm calls. All releases since 0.1.5 have them, unless a suppressed import error
# removed one.
AITER_NAMES = ("flash_attn_func", "flash_attn_varlen_func", "rms_norm", "silu_and_mul")
FLAGS = (
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.benchmark",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
)


class Journal:
    """A file with the facts that have been collected so far."""

    def __init__(self, file: Path) -> None:
        self.facts: dict[str, Any] = {}
        self._file = file
        self._stage = "start"
        self._error: str | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the dict of facts, to which this stage adds its facts. An exception ends the task and is recorded."""
        self._stage = name
        self._write()
        try:
            yield self.facts
        except BaseException as error:
            lines = str(error).strip().splitlines() or ["no message"]
            self._error = f"{type(error).__name__}: {lines[0]}"
            raise
        finally:
            self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps({"facts": self.facts, "stage": self._stage, "error": self._error}))


def examine_torch(journal: Journal) -> None:
    with journal.stage("import"):
        import torch
    with journal.stage("the check of its build") as facts:
        facts |= {"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda}
        flags = getattr(torch._C, "_cuda_getArchFlags", None)
        facts["built_for"] = (flags() or "").split() if flags else []
    with journal.stage("the check of its flags") as facts:
        facts["flags"] = {name: _flag(torch, name) for name in FLAGS}
    with journal.stage("the detection of devices") as facts:
        facts["available"] = torch.cuda.is_available()
        if not facts["available"]:
            facts["why_not"] = _error_of(torch.cuda.init)
            return
        facts["devices"] = [_device(torch, index) for index in range(torch.cuda.device_count())]
    for index, device in enumerate(facts["devices"]):
        with journal.stage(f"a GEMM on GPU {index} ({device['arch']})"):
            device["gemm"] = _error_of(partial(_gemm, torch, index))
        with journal.stage(f"flash attention on GPU {index} ({device['arch']})"):
            device["flash"] = _flash(torch, index)
    with journal.stage("the test of the allocator with these settings") as facts:
        facts["allocator"] = _allocate(torch)
    with journal.stage("the check of peer access") as facts:
        count = len(facts["devices"])
        if count > 1:
            facts["peers"] = [
                [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
                for one in range(count)
            ]
            nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
            facts["collectives"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    with journal.stage("the detection of the collectives library") as facts:
        facts["collectives_loaded"] = _loaded_collectives(Path("/proc/self/maps"))


def examine_aiter(journal: Journal) -> None:
    with journal.stage("import"):
        import aiter
    with journal.stage("import of aiter.tuned_gemm"):
        import aiter.tuned_gemm
    with journal.stage("the check of its functions") as facts:
        facts["missing"] = [name for name in AITER_NAMES if not callable(getattr(aiter, name, None))]


def examine_bitsandbytes(journal: Journal) -> None:
    with journal.stage("import"):
        import bitsandbytes
        import torch
    for index in range(torch.cuda.device_count()):
        with journal.stage(f"a 4-bit GEMM on GPU {index}") as facts:
            error = kernels.four_bit_gemm(torch, bitsandbytes, f"cuda:{index}")
            facts.setdefault("gemms", {})[str(index)] = error


def examine_patch_embedding(journal: Journal) -> None:
    with journal.stage("import"):
        import torch
    for index in range(torch.cuda.device_count()):
        with journal.stage(f"a Conv3d on GPU {index}") as facts:
            facts.setdefault("seconds", {})[str(index)] = kernels.patch_embedding(torch, f"cuda:{index}")


TASKS: dict[str, Callable[[Journal], None]] = {
    "torch": examine_torch,
    "aiter": examine_aiter,
    "bitsandbytes": examine_bitsandbytes,
    "patch-embedding": examine_patch_embedding,
}


def _flag(torch: Any, name: str) -> object:
    """Set a flag to its current value and return this value; if this fails, return the error's text."""
    owner, attribute = torch, name
    try:
        *path, attribute = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        value = getattr(owner, attribute)
        setattr(owner, attribute, value)
    except (AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, bool) else str(value)


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "arch": properties.gcnArchName.split(":")[0]
        if torch.version.hip
        else f"sm_{properties.major}{properties.minor}",
        "units": properties.multi_processor_count,
        "total": total,
        "free": free,
        "integrated": bool(getattr(properties, "is_integrated", False)),
    }


def _gemm(torch: Any, index: int) -> None:
    left = torch.arange(64 * 64, dtype=torch.float32, device=f"cuda:{index}").reshape(64, 64) % 7
    right = left.t().contiguous()
    # with fp32 accumulation, a GEMM of small integers is exact until it is rounded, so the results must be equal
    actual = (left.bfloat16() @ right.bfloat16()).float().cpu()
    expected = (left.cpu() @ right.cpu()).bfloat16().float()
    if not torch.equal(actual, expected):
        raise ArithmeticError(f"a 64 × 64 GEMM is wrong by up to {(actual - expected).abs().max().item():g}")


def _flash(torch: Any, index: int) -> str | None:
    """Return PyTorch's reason why SDPA's flash kernel refuses a plain bf16 call; None if the kernel accepts it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.randn(1, 4, 64, 64, dtype=torch.bfloat16, device=f"cuda:{index}")
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        warnings.simplefilter("always")
        error = _error_of(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().item())
    messages = [str(record.message).split(" (Triggered", 1)[0] for record in caught]
    specific = [message for message in messages if "kernel not used because" not in message]
    return None if error is None else (specific or [error])[0]


def _allocate(torch: Any) -> dict[str, Any]:
    """Allocate and free large blocks, to test that freed memory is reused and a live block is not overwritten."""
    device = "cuda:0"
    error = None
    canary = torch.ones(5 * MIB, device=device)
    fences, baseline = [], 0
    try:
        for turn in range(8):
            blocks = [torch.empty(size * MIB, dtype=torch.uint8, device=device) for size in (48, 160, 40)]
            fences.append(torch.zeros(256, device=device))
            del blocks
            if turn == 1:
                baseline = torch.cuda.memory_reserved(device)
            if not bool((canary == 1).all()):
                raise ArithmeticError("a live block was overwritten")
    except (RuntimeError, ArithmeticError) as caught:
        error = f"{type(caught).__name__}: {(str(caught).splitlines() or ['no message'])[0]}"
    return {
        "error": error,
        "expandable": bool(torch.cuda.memory._snapshot().get("allocator_settings", {}).get("expandable_segments")),
        "reserved_after_2": baseline,
        "reserved_after_8": torch.cuda.memory_reserved(device),
    }


def _loaded_collectives(maps: Path) -> dict[str, str] | None:
    """Return the path and version of the loaded RCCL or NCCL, or None if there is none or its version is unknown.

    torch reports only the version that it was built with.
    """
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return None
    paths = [line.split(maxsplit=5)[-1] for line in lines]
    library = next((path for path in paths if re.search(r"/lib[rn]ccl\.so", path)), None)
    if library is None:
        return None
    number = ctypes.c_int()
    if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    return {"path": library, "version": version_of(number.value)}


def version_of(code: int) -> str:
    """Convert `22707` to `2.27.7`: since 2.9, the minor number and the patch number have two digits each."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except (RuntimeError, AssertionError, ArithmeticError, NotImplementedError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


if __name__ == "__main__":
    TASKS[sys.argv[1]](Journal(Path(sys.argv[2])))
