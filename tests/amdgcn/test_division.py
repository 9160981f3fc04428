"""The compiler's sequence for a float32 division rounds correctly, and other sequences are not mistaken for it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.amdgcn import mutate, sequences
from tests.amdgcn.one import ARCHITECTURES, CDNA, execute, lanes, program

f32 = np.float32
# Exponents of float32, including subnormal numbers.
SMALLEST, LARGEST = -149, 127
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 3e38, 1, -1], f32)
# Waves per launch.
WAVES = 600


def sequence(arch):
    vcc, other = ("vcc", "s[0:1]") if arch in CDNA else ("vcc_lo", "s0")
    return [
        f"v_div_scale_f32 v3, {other}, v2, v2, v1",
        f"v_div_scale_f32 v4, {vcc}, v1, v2, v1",
        "v_rcp_f32_e32 v8, v3",
        "v_fma_f32 v6, -v3, v8, 1.0",
        "v_fma_f32 v5, v6, v8, v8",
        "v_mul_f32_e32 v6, v4, v5",
        "v_fma_f32 v7, -v3, v6, v4",
        "v_fma_f32 v6, v7, v5, v6",
        "v_fma_f32 v7, -v3, v6, v4",
        "v_div_fmas_f32 v7, v7, v5, v6",
        "v_div_fixup_f32 v7, v7, v2, v1",
    ]


def divided(arch, a, b):
    """Return (a / b, v_rcp of the scaled denominator), computed with the compiler's sequence."""
    lines = sequence(arch)
    size = lanes(arch) * WAVES
    parts = []
    for start in range(0, len(a), size):
        block = [np.resize(x[start : start + size], size).reshape(WAVES, -1) for x in (a, b)]
        state = execute(arch, lines, dict(zip(("v1", "v2"), block, strict=True)), waves=WAVES)
        parts.append([state.v[register].view(f32).reshape(-1) for register in (7, 8)])
    quotient, inverse = (np.concatenate(part)[: len(a)] for part in zip(*parts, strict=True))
    return quotient, inverse


def numbers(generator, power_of_two):
    """Two arrays [n] that contain a pair of numbers for every pair of exponents."""
    exponents = np.arange(SMALLEST, LARGEST + 1)
    pairs = []
    for exponent in np.meshgrid(exponents, exponents):
        mantissa = np.ones(exponent.size) if power_of_two else generator.uniform(1, 2, exponent.size)
        pairs.append((np.ldexp(mantissa, exponent.ravel()) * generator.choice([-1, 1], exponent.size)).astype(f32))
    return pairs


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_pair_of_exponents_is_rounded_correctly(arch, power_of_two):
    with np.errstate(all="ignore"):
        a, b = numbers(np.random.default_rng(5), power_of_two)
        quotient, inverse = divided(arch, a, b)
        np.testing.assert_array_equal(quotient, a / b)
        assert (np.abs(a / b) < 2.0**-126).mean() > 0.1 and np.isinf(a / b).mean() > 0.1
    finite = np.isfinite(a) & np.isfinite(b)
    assert (np.abs(inverse[finite]) >= 2.0**-126).all(), "v_rcp flushes subnormal results on a GPU"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_zeros_infinities_and_nan(arch):
    with np.errstate(all="ignore"):
        a, b = (grid.ravel() for grid in np.meshgrid(SPECIAL, SPECIAL))
        np.testing.assert_array_equal(divided(arch, a, b)[0], a / b)
        assert (np.signbit(divided(arch, a, b)[0]) == np.signbit(a / b))[~np.isnan(a / b)].all()


def wrong(arch, lines):
    return [index for index, _ in sequences.wrong(program(arch, lines))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_sequence_is_recognised_in_all_forms_that_compilers_emit(arch):
    lines = sequence(arch)
    assert wrong(arch, lines) == []
    assert wrong(arch, ["v_mov_b32_e32 v9, v2", lines[0], lines[1].replace("v2", "v9"), *lines[2:]]) == []
    assert wrong(arch, [*lines[:7], "v_fmac_f32_e32 v6, v5, v7", *lines[8:]]) == []
    swapped = lines[3].replace("-v3, v8", "v8, -v3")
    assert wrong(arch, [*lines[:3], swapped, *lines[4:]]) == []
    signs = ["v_xor_b32_e32 v9, 0x80000000, v3", *(line.replace("-v3", "v9") for line in lines[3:])]
    assert wrong(arch, [*lines[:3], *signs]) == []
    if arch not in CDNA:
        pair = "v_dual_mul_f32 v6, v4, v5 :: v_dual_mov_b32 v9, 0"
        assert wrong(arch, [*lines[:5], pair, *lines[6:]]) == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_fault_of_the_sequence_is_reported(arch):
    lines, rng, kinds = sequence(arch), random.Random(3), set()
    for index, line in enumerate(lines):
        for name in ("another operand", "another destination", "another operation", "another constant"):
            for _ in range(8):
                after = mutate.KINDS[name](line, rng)
                result = name == "another destination" and index == len(lines) - 1
                if after not in (None, line) and not result:
                    kinds.add(name)
                    assert wrong(arch, [*lines[:index], after, *lines[index + 1 :]]) == [len(lines) - 1], after
    assert len(kinds) >= 3


def test_a_jump_into_the_sequence_and_an_overwritten_vcc_are_reported():
    lines = sequence("gfx942")
    assert wrong("gfx942", [*lines[:9], "loop:", *lines[9:], "s_cbranch_scc0 loop"]) == [10]
    assert wrong("gfx942", [*lines[:9], "unused:", *lines[9:]]) == []
    assert wrong("gfx942", [lines[0], lines[1], "v_cmp_eq_u32_e32 vcc, 0, v0", *lines[2:]]) == [11]
