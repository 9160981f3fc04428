"""The simulated AMD GPU, the state of the process afterwards, the addresses of tensors, and the packed arguments."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_rocm.device import Device, describe, simulated
from hf_rocm.ops.triton.builds import ARCHITECTURES
from tests.amdgcn.device import GPUS
from tests.amdgcn.driver import NANS, Space, base
from tests.amdgcn.kernarg import pack, scalar
from tests.amdgcn.machine import Garbage
from tests.amdgcn.machine.targets import TARGETS
from tests.conftest import ROOT

CPU = torch.device("cpu")


def test_every_architecture_has_a_gpu_and_a_suite(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import machine_code

    assert set(GPUS) == set(TARGETS) == set(ARCHITECTURES)
    assert {*machine_code.ARCHITECTURES, *machine_code.RELATIVES} == set(GPUS)
    assert {name: gpu.lanes for name, gpu in GPUS.items()} == ARCHITECTURES


def test_related_architectures_share_instructions():
    from tests.amdgcn import one

    assert TARGETS["gfx1150"] == TARGETS["gfx1151"]
    assert TARGETS["gfx1150"] == replace(TARGETS["gfx1100"], scalar_float=True) != TARGETS["gfx1100"]
    assert TARGETS["gfx1200"] == TARGETS["gfx1201"]
    assert {*TARGETS} - {*one.ARCHITECTURES} == {"gfx1150", "gfx1151", "gfx1200"}


def test_the_cpu_is_described_as_another_device_within_the_block():
    before = describe(CPU)
    with simulated("cpu", GPUS["gfx942"].described()):
        assert describe(CPU) == Device("cuda", rocm=True, arch="gfx942")
        assert describe(CPU).units == 304
    assert describe(CPU) == before == Device("cpu", rocm=False)


def test_triton_targets_the_gpu_within_the_block():
    pytest.importorskip("triton", reason="not run: needs Triton")
    from triton.backends import backends
    from triton.runtime import driver

    from tests.amdgcn.driver import presented

    amd, active = backends["amd"], driver._active
    with presented(GPUS["gfx1201"]) as instance:
        assert driver.active is instance and torch.version.hip
        target = driver.active.get_current_target()
        assert (target.backend, target.arch, target.warp_size) == ("hip", "gfx1201", 32)
        assert instance.utils.get_device_properties(0)["max_shared_mem"] == 65536
    assert backends["amd"] is amd and driver._active is active


def test_storages_are_far_apart_and_views_lie_inside():
    space = Space(cdna=True)
    x, y = torch.zeros(64), torch.zeros(64)
    first, second = space.address(x), space.address(y)
    assert space.address(x[3:]) == first + 12
    assert abs(second - first) > 2**32
    assert first % 4096 == x.data_ptr() % 4096


def test_addresses_use_every_high_bit_and_cross_a_multiple_of_4_gib():
    """In two consecutive launches, the addresses of a storage together set all of bits 32 to 47, and the storage
    crosses a multiple of 2³² in exactly one of them. Storages are far apart and keep their alignment."""
    for place in range(12):
        bases = [base(place, turn, 10_000, 0x1230) for turn in range(2)]
        assert {start >> 32 != start + 9_999 >> 32 for start in bases} == {True, False}
        assert bases[0] >> 32 | bases[1] >> 32 == 0xFFFF
    for turn in range(40):
        bases = sorted(base(place, turn, 10_000, 0x1230) for place in range(40))
        assert bases[-1] + 10_000 <= 2**48 and {start % 4096 for start in bases} == {0x230}
        assert min(b - a for a, b in pairwise(bases)) > 2**32 + 10_000


@pytest.mark.parametrize("dtype", NANS)
def test_a_stored_nan_with_bits_that_no_operation_produces_is_an_error(dtype):
    space, values = Space(cdna=True), torch.tensor([1.0, float("inf"), float("nan"), -float("nan")]).to(dtype)
    written = {space.address(values): np.ones(values.nbytes, bool)}
    space.check_numbers(written)
    integers = values.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    # This changes the payload of the NaN.
    integers[2] ^= 2
    with pytest.raises(Garbage, match="1 NaN"):
        space.check_numbers(written)
    written[space.address(values)][2 * dtype.itemsize : 3 * dtype.itemsize] = False
    space.check_numbers(written)


def test_bytes_outside_tensors_are_hidden():
    """The bytes before, between and after the rows of a view are hidden; a storage that is passed as a whole has no
    hidden bytes."""
    space = Space(cdna=True)
    wide, whole = torch.zeros(3, 8), torch.zeros(24)
    start = space.address(wide[:2, 1:4]) - 4
    space.address(whole[:3])
    other = space.address(whole)
    space.hide()
    hidden = space.memory.buffer_at(start)
    visible = hidden.hidden_units[1][hidden.start : hidden.length].reshape(3, 8, 4).all(2) == 0
    assert np.array_equal(visible, [[0, 1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0], [0] * 8])
    assert not space.memory.buffer_at(other).hidden_units


def test_numbers_are_converted_as_in_the_launcher():
    assert scalar(-2, "i32") == struct.pack("<i", -2)
    assert scalar(True, "i1") == b"\1"
    assert scalar(2**40, "i64") == struct.pack("<q", 2**40)
    assert scalar(1.5, "fp32") == struct.pack("<f", 1.5)
    assert scalar(1.0, "bf16") == b"\x80\x3f"


def argument(offset, size, kind="by_value"):
    return SimpleNamespace(offset=offset, size=size, kind=kind)


def test_arguments_are_packed_at_the_offsets_that_the_code_reads():
    fields = [argument(0, 8), argument(8, 4), argument(16, 8), argument(24, 4, "hidden_block_count_x")]
    program = SimpleNamespace(arguments=fields, kernarg_size=32)
    block = pack(program, [bytes(range(8)), b"abcd"], (7, 1, 1), 256)
    assert block == bytes(range(8)) + b"abcd" + bytes(12) + struct.pack("<I", 7) + bytes(4)
    with pytest.raises(ValueError, match="expected an argument of 8 bytes"):
        pack(program, [b"abcd"], (1, 1, 1), 64)
    with pytest.raises(ValueError, match="1 more arguments"):
        pack(program, [bytes(8), bytes(4), bytes(8), bytes(4)], (1, 1, 1), 64)
