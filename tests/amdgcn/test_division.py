"""The sequence that the compiler emits for a float32 division rounds correctly, whatever the exponents are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.amdgcn.one import ARCHITECTURES, CDNA, execute, lanes

f32 = np.float32
SMALLEST, LARGEST = -149, 127  # exponents of float32, subnormal numbers among them
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 3e38, 1, -1], f32)
WAVES = 600  # at a time


def divided(arch, a, b):
    """(a / b, the inverse that v_rcp returned for the scaled denominator), computed as the compiler does."""
    vcc, other = ("vcc", "s[0:1]") if arch in CDNA else ("vcc_lo", "s0")
    lines = [
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
    size = lanes(arch) * WAVES
    parts = []
    for start in range(0, len(a), size):
        block = [np.resize(x[start : start + size], size).reshape(WAVES, -1) for x in (a, b)]
        state = execute(arch, lines, dict(zip(("v1", "v2"), block, strict=True)), waves=WAVES)
        parts.append([state.v[register].view(f32).reshape(-1) for register in (7, 8)])
    quotient, inverse = (np.concatenate(each)[: len(a)] for each in zip(*parts, strict=True))
    return quotient, inverse


def numbers(generator, power_of_two):
    """[n], [n]: one pair of numbers for every pair of exponents."""
    exponents = np.arange(SMALLEST, LARGEST + 1)
    pairs = []
    for exponent in np.meshgrid(exponents, exponents):
        mantissa = np.ones(exponent.size) if power_of_two else generator.uniform(1, 2, exponent.size)
        pairs.append((np.ldexp(mantissa, exponent.ravel()) * generator.choice([-1, 1], exponent.size)).astype(f32))
    return pairs


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_pair_of_exponents(arch, power_of_two):
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
        a, b = (each.ravel() for each in np.meshgrid(SPECIAL, SPECIAL))
        np.testing.assert_array_equal(divided(arch, a, b)[0], a / b)
        assert (np.signbit(divided(arch, a, b)[0]) == np.signbit(a / b))[~np.isnan(a / b)].all()
