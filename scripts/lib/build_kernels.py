"""scripts/build-kernels: compile the kernels of hf_rocm.ops.triton for AMD GPUs, without such a GPU, and analyse the
code.

Triton includes its AMD compiler, so the code for a GPU can be generated and analysed on any machine. The analysis
reports the numbers of registers and spills, the size of the shared memory (LDS), whether GEMMs use matrix instructions,
and whether `tests/amdgcn` can execute every instruction.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from lib.console import ScriptError, duration, echo, styled, table
from lib.environments import ROOT

KERNELS = "hf_rocm.ops.triton.kernels"

# Short labels for the constants of kernels.
SHORT = {
    "BLOCK": "block",
    "DIM": "d",
    "HEADS": "h",
    "KV_HEADS": "hkv",
    "ROTATED": "r",
    "VALUE_DIM": "dv",
    "ACTIVATION": "",
}


@dataclass(frozen=True)
class Built:
    """The result of one build for one architecture. problems: the errors, as text; empty if the build is good."""

    kernel: str
    form: str
    architecture: str
    warps: int
    vgprs: int = 0
    sgprs: int = 0
    spilled_vgprs: int = 0
    spilled_sgprs: int = 0
    scratch_bytes: int = 0
    lds_bytes: int = 0
    lds_limit: int = 0
    matrix_instructions: int = 0
    seconds: float = 0.0
    problems: tuple[str, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every build is good, else 1."""
    parser = argparse.ArgumentParser(
        prog="scripts/build-kernels",
        description="Compile every Triton kernel for AMD GPUs, on any machine. Failed compilations, spilled registers, "
        "scratch memory, too much shared memory (LDS), GEMMs without matrix instructions and instructions that the "
        "tests cannot execute are errors. Needs torch, NumPy and Triton.",
    )
    parser.add_argument("kernels", nargs="*", help="modules of kernels, such as norm (default: all)")
    parser.add_argument("--arch", action="append", help="an architecture such as gfx942 (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default: 2, or 1 on a single core)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    # Compile the kernels of this checkout.
    sys.path.insert(0, str(ROOT))
    began = time.monotonic()
    jobs = list(_jobs(options.kernels, options.arch))
    if not jobs:
        raise ScriptError("no kernel matches")
    results = list(map(_build, jobs)) if options.jobs == 1 else _in_processes(jobs, options.jobs)
    if options.json:
        echo(json.dumps([asdict(kernel) for kernel in results], indent=1))
    else:
        _show(results, time.monotonic() - began)
    return 1 if any(kernel.problems for kernel in results) else 0


def _in_processes(jobs: list[tuple[str, int, str]], count: int) -> list[Built]:
    """Build in fresh interpreters, since Triton's compiler does not support fork."""
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_build, jobs, chunksize=4))


def _jobs(modules: Sequence[str], architectures: Sequence[str] | None) -> Iterator[tuple[str, int, str]]:
    """Yield (module, index in the module's BUILDS, architecture)."""
    if os.environ.get("TRITON_INTERPRET"):
        raise ScriptError("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled\n\nhint: unset it")
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ScriptError(
            f"the kernels can't be compiled without Triton\n  found  {error}\n\nhint: pip install triton"
        ) from None
    package = importlib.import_module(KERNELS)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    unknown = set(modules) - set(names)
    if unknown:
        raise ScriptError(f"there are no kernels in {', '.join(sorted(unknown))}\n  known  {', '.join(names)}")
    for name in names:
        if modules and name not in modules:
            continue
        for index, build in enumerate(importlib.import_module(f"{KERNELS}.{name}").BUILDS):
            for architecture in build.architectures:
                if not architectures or architecture in architectures:
                    yield name, index, architecture


def _build(job: tuple[str, int, str]) -> Built:
    """Compile one build of a kernel for one architecture. Runs in a process of the pool, unless `--jobs` is 1."""
    from triton.backends.compiler import GPUTarget

    from hf_rocm.ops.triton.builds import ARCHITECTURES, SHARED_MEMORY, compiled_for

    module, index, architecture = job
    build = importlib.import_module(f"{KERNELS}.{module}").BUILDS[index]
    lanes = ARCHITECTURES[architecture]
    built = {
        "kernel": build.kernel.__name__.removesuffix("_kernel"),
        "form": _form(build),
        "architecture": architecture,
        "warps": build.warps(lanes),
        "lds_limit": SHARED_MEMORY.get(architecture, 64 * 1024),
    }
    began = time.monotonic()
    try:
        compiled = compiled_for(build, GPUTarget("hip", architecture, lanes))
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything, and every kernel gets a line
        lines = str(error).strip().splitlines() or ["no message"]
        return Built(**built, problems=(f"{type(error).__name__}: {lines[-1]}",))
    facts = {**built, **_facts(compiled), "seconds": round(time.monotonic() - began, 2)}
    return _judged(build, facts, _unknown(compiled.asm["amdgcn"], architecture))


def _unknown(text: str, architecture: str) -> tuple[str, ...]:
    """Return a tuple with an error if the tests, which parse the code in the same way, can't execute it, else ()."""
    from tests.amdgcn.machine import Program, UnknownInstruction

    try:
        Program.parse(text, architecture)
    except UnknownInstruction as error:
        return (f"tests/amdgcn cannot execute it: {error}",)
    return ()


def _facts(compiled: Any) -> dict[str, int]:
    """The assembler's statistics, the size of the shared memory (LDS), and the number of matrix instructions."""
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"^\s*\.{name}:\s*(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else 0

    return {
        "vgprs": number("vgpr_count"),
        "sgprs": number("sgpr_count"),
        "spilled_vgprs": number("vgpr_spill_count"),
        "spilled_sgprs": number("sgpr_spill_count"),
        "scratch_bytes": number("private_segment_fixed_size"),
        "lds_bytes": compiled.metadata.shared,
        "matrix_instructions": len(re.findall(r"^\s*v_(?:mfma|smfmac|wmma|swmmac)_", text, re.MULTILINE)),
    }


def _judged(build: Any, facts: dict[str, Any], unknown: tuple[str, ...] = ()) -> Built:
    problems = [*unknown]
    spilled = facts["spilled_vgprs"] + facts["spilled_sgprs"]
    if spilled or facts["scratch_bytes"]:
        problems.append(f"{spilled} registers spilled, {facts['scratch_bytes']} bytes of scratch")
    if facts["lds_bytes"] > facts["lds_limit"]:
        problems.append(f"{facts['lds_bytes']} bytes of shared memory (LDS), of {facts['lds_limit']} available")
    if build.matrix and not facts["matrix_instructions"]:
        problems.append("no matrix instruction")
    return Built(**facts, problems=tuple(problems))


def _form(build: Any) -> str:
    """The properties that distinguish a build from the kernel's other builds: types, constants except BLOCK_ sizes, and
    absent tensors."""
    types = sorted({kind.strip("*") for kind in build.signature.values() if kind.startswith("*")} - {"i64", "i32"})
    words = ["/".join(types)]
    for name, value in build.constants.items():
        label = SHORT.get(name, name.lower())
        if value is True:
            words.append(label)
        elif value is not None and value is not False and not name.startswith("BLOCK_"):
            words.append(f"{label}{'=' if label else ''}{value}")
    absent = [name for name, value in build.constants.items() if value is None]
    return " ".join([*words, *([f"no {'/'.join(absent)}"] if absent else [])])


def _show(results: Sequence[Built], seconds: float) -> None:
    """Print a line per build and architecture, then the problems."""
    header = ("kernel", "arch", "warps", "VGPR", "SGPR", "spilled", "LDS", "matrix", "")
    rows, last = [], ""
    for kernel in results:
        name = f"{kernel.kernel} {kernel.form}"
        spilled = kernel.spilled_vgprs + kernel.spilled_sgprs
        numbers = (kernel.warps, kernel.vgprs, kernel.sgprs, spilled, kernel.lds_bytes, kernel.matrix_instructions)
        rows.append(
            (
                "" if name == last else name[:80],
                kernel.architecture,
                *map(str, numbers),
                "bad" if kernel.problems else "ok",
            )
        )
        last = name
    table(header, rows)
    bad = [kernel for kernel in results if kernel.problems]
    echo()
    for kernel in bad:
        echo(
            f"  {styled('bad', 'red')}  {kernel.kernel} {kernel.form} on {kernel.architecture}: "
            f"{'; '.join(kernel.problems)}"
        )
    echo(f"{len(results)} builds, {len(bad)} bad, {duration(seconds)}")
