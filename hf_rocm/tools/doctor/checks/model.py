"""Report the size of a named model, and check whether it fits on the GPUs and in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.budget import of_one_pool
from hf_rocm.tools.doctor.facts import Facts, version
from hf_rocm.tools.doctor.model import BYTES, ModelFacts
from hf_rocm.tools.doctor.report import Finding, ok, problem, warning

GIB = 2**30
# Memory for the runtime, the workspaces of its libraries, and the activations of a short prompt.
RUNTIME = 2 * GIB


def model(facts: Facts) -> Iterator[Finding]:
    named = facts.model
    if named is None:
        return
    if named.folder is None:
        room = f"; {_size(named.free)} is free on the disk of the Hub's cache" if named.free is not None else ""
        yield ok("model", f"{named.name} is not on this machine yet, so its size is unknown{room}")
        return
    if not named.weights:
        yield problem(
            "model",
            f"{named.name}: no weights in {named.folder}",
            means="it cannot be loaded",
            fix=f"hf download {named.name}"
            if "/" in named.name and named.folder != named.name
            else "specify the folder of the checkpoint",
        )
        return
    needed = _needed(facts, named)
    words = f"{named.name}: {_size(named.weights)} of weights{f' in {named.dtype}' if named.dtype else ''}"
    if needed > named.weights:
        words += f", {_size(needed)} once loaded in fp32"
    yield ok("model", words)
    yield from _on_gpu(facts, named, needed)
    yield from _on_host(named)


def _needed(facts: Facts, named: ModelFacts) -> int:
    """Return the size of the weights in bytes after a plain from_pretrained.

    Before release 5, transformers converts unquantised weights to fp32.
    """
    release = version(facts.transformers.version)
    width = BYTES.get(named.dtype or "", 4)
    if release is not None and release.major < 5 and width < 4 and not named.quantized:
        return named.weights * 4 // width
    return named.weights


def _on_gpu(facts: Facts, named: ModelFacts, needed: int) -> Iterator[Finding]:
    if not facts.devices:
        return
    free = [int(str(device["free"])) for device in facts.devices]
    shared = facts.shares_memory
    if shared is not None and named.memory is not None:
        total = int(str(shared["total"]))
        free[0] = min(of_one_pool(free[0], named.memory, facts.driver.carved_out), total)
    left = free[0] - needed - RUNTIME
    if left >= 0:
        tokens = f", room for about {left // named.per_token:,} tokens of cache" if named.per_token else ""
        yield ok("model-memory", f"fits on GPU 0: {_size(free[0])} free{tokens}")
    elif free[0] >= named.weights + RUNTIME:
        yield warning(
            "model-memory",
            f"GPU 0 has {_size(free[0])} free: enough for the checkpoint, but not in fp32",
            means="from_pretrained runs out of memory",
            fix='pass dtype="auto" (torch_dtype before 4.56)',
        )
    elif sum(free) >= needed + RUNTIME * len(free):
        yield warning(
            "model-memory",
            f"GPU 0 has {_size(free[0])} free, and the {len(free)} GPUs together have {_size(sum(free))}",
            means="it fits only on several GPUs",
            fix='pass device_map="auto", or tp_plan="auto" under torchrun',
        )
    else:
        yield problem(
            "model-memory",
            f"{_size(sum(free))} is free on the GPUs, but {_size(needed + RUNTIME)} is needed",
            means="it does not fit there in this form",
            fix='quantize="fp8" or "int8" in hf_rocm.from_pretrained halves the weights; '
            "or free memory (rocm-smi --showpids)",
        )


def _on_host(named: ModelFacts) -> Iterator[Finding]:
    if named.memory is not None and named.memory < named.weights // 2:
        yield warning(
            "model-host",
            f"{_size(named.memory)} of the host's memory is free, for {_size(named.weights)} of weights",
            means="loading reads the files through the page cache, which is slow and may fail on integrated GPUs",
            fix="stop other processes that use memory, or load on a machine with more memory",
        )


def _size(count: int | None) -> str:
    count = count or 0
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
