"""Faults of every kind in one kernel are detected. `faults.py` plants hundreds of faults, which takes too long here."""

from __future__ import annotations

import random

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops.pointwise import eager_rms_norm
from tests.amdgcn import driver, mutate
from tests.amdgcn.device import GPUS
from tests.amdgcn.machine import MachineError, UnknownInstruction
from tests.tolerance import assert_as_good_as_eager

pytest.importorskip("triton", reason="not run: needs Triton")
# The tests use only one architecture, because Triton caches compiled kernels per process.
ARCH = "gfx942"


@pytest.fixture(scope="module")
def loaded():
    """Yield (a function that calls the kernel and checks its result, the launched code, the reached instructions)."""
    x, weight = (torch.randn(size, generator=torch.Generator().manual_seed(7)) for size in ((2, 3000), (3000,)))
    expected = eager_rms_norm(x.double(), weight.double(), 1e-6, False)

    def check():
        # This setting fills unwritten elements with NaN.
        torch.use_deterministic_algorithms(True)
        try:
            with options.override(tier="triton", probe=False):
                output = ops.rms_norm(x, weight, eps=1e-6)
        finally:
            torch.use_deterministic_algorithms(False)
        assert_as_good_as_eager(output, eager_rms_norm(x, weight, 1e-6, False), expected)

    launches = []
    driver.WATCHERS.append(lambda code, report, setup: launches.append((code, report)))
    with driver.presented(GPUS[ARCH]):
        check()
        driver.WATCHERS.pop()
        ((code, report),) = launches
        yield check, code, sorted(report.reached)


@pytest.mark.parametrize("kind", mutate.KINDS)
def test_a_planted_fault_is_found(kind, loaded):
    """At least one of the first three applicable faults is detected. A single fault may have no effect, such as the
    omission of a redundant wait."""
    check, code, reached = loaded
    whole, rng, planted = code.program, random.Random(kind), 0
    order = rng.sample(reached, len(reached))
    try:
        for index in order:
            before = code.instructions()[index]
            after = mutate.KINDS[kind](before, rng)
            if after in (None, before):
                continue
            try:
                code.program = whole.with_instruction(index, after)
            except UnknownInstruction:
                continue
            planted += 1
            try:
                check()
            except (AssertionError, MachineError):
                return
            finally:
                code.program = whole
            if planted == 3:
                break
    finally:
        code.program = whole
    assert planted, "no instruction of the kernel allows such a fault"
    pytest.fail(f"{planted} faults were not detected")
