"""Floating-point instructions are compared with exact results, NumPy's functions and PyTorch's conversions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from .machine import UnknownInstruction, floats
from .one import ARCHITECTURES, CDNA, execute, lanes, vector

f16, f32 = np.float16, np.float32


def specials() -> np.ndarray:
    """Numbers at the limits of float32, bf16, float16 and 8-bit floats, and ties between neighbours."""
    tiny = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-133, 2.0**-24, 2.0**-25, 2.0**-14, 2.0**-9, 2.0**-10, 2.0**-17]
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-4, 1 + 3 * 2.0**-4, 1.125, 1.375]
    large = [240.0, 248.0, 256.0, 448.0, 464.0, 57344.0, 61440.0, 65504.0, 65520.0, 3.3e38, np.inf, -np.inf, np.nan]
    return np.array([*tiny, *ties, *large], f32)


def numbers(count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    spread = generator.standard_normal(count).astype(f32) * np.exp2(generator.integers(-20, 17, count)).astype(f32)
    return np.concatenate([specials(), spread])


def in_batches(arch: str, text: str, source: np.ndarray, dtype: type) -> np.ndarray:
    """Compute v2 from v1 with `text`, for more values than a wave has lanes."""
    size = lanes(arch)
    padded = np.resize(source, -(-len(source) // size) * size)
    parts = [vector(execute(arch, text, {"v1": part}), "v2") for part in padded.reshape(-1, size)]
    return np.concatenate(parts)[: len(source)].view(dtype)


def exact(a: float, b: float, c: float) -> Fraction:
    return Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))


def nearest(value: Fraction, dtype: type) -> float:
    """Round a fraction to float16 or float32, ties to even, by comparing its neighbours."""
    guess = dtype(float(value))
    with np.errstate(all="ignore"):
        candidates = [np.nextafter(guess, dtype(-np.inf)), guess, np.nextafter(guess, dtype(np.inf))]
    finite = [x for x in candidates if np.isfinite(x)]
    best = min(abs(Fraction(float(x)) - value) for x in finite)
    closest = [x for x in finite if abs(Fraction(float(x)) - value) == best]
    bits = np.uint16 if dtype is f16 else np.uint32
    return min(closest, key=lambda x: int(x.view(bits)) & 1)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_fused_multiply_add_rounds_once(arch):
    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal(lanes(arch)).astype(f32) for _ in range(2))
    c = -(a * b) * (1 + generator.integers(-3, 4, lanes(arch)) * 2.0**-12)
    # double rounding gets the first sum wrong: it is above a midpoint by less than float64 can resolve
    a[0], b[0], c[0] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60
    a[1], b[1], c[1] = 1.0, 1 + 2.0**-23, 2.0**-24
    a[2], b[2], c[2] = 2.0**-30, -(2.0**-30), 1 + 2.0**-23
    state = execute(arch, "v_fma_f32 v4, v1, v2, v3", {"v1": a, "v2": b, "v3": c.astype(f32)})
    expected = [nearest(exact(x, y, z), f32) for x, y, z in zip(a, b, c.astype(f32), strict=True)]
    np.testing.assert_array_equal(vector(state, "v4", f32), np.array(expected, f32))


def test_rounding_twice_would_differ():
    """Neither sum is exact in float64, where both round to the midpoint between two float32 numbers."""
    a = np.array([1 + 2.0**-23], f32)
    total = np.array([1 + 2.0**-24], np.float64)
    for error, expected in ((2.0**-80, 1 + 2.0**-23), (-(2.0**-80), 1.0)):
        rounded = floats.round_to_odd(total, np.array([error])).astype(f32)
        assert rounded[0] == expected
    c = np.array([2.0**-24], f32)
    assert floats.fma32(a, np.array([1.0], f32), c)[0] == nearest(exact(a[0], 1.0, c[0]), f32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fused_multiply_add_of_float16(arch):
    generator = np.random.default_rng(2)
    a, b, c = (generator.standard_normal(lanes(arch)).astype(f16) for _ in range(3))
    c[::3] = -(a * b)[::3]
    packed = [x.view(np.uint16).astype(np.uint32) for x in (a, b, c)]
    state = execute(arch, "v_fma_f16 v4, v1, v2, v3", {f"v{i + 1}": x for i, x in enumerate(packed)})
    actual = vector(state, "v4").astype(np.uint16).view(f16)
    expected = [nearest(exact(x, y, z), f16) for x, y, z in zip(*(v.astype(float) for v in (a, b, c)), strict=True)]
    np.testing.assert_array_equal(actual, np.array(expected, f16))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float16_conversions_match_pytorch(arch):
    source = numbers(400)
    codes = in_batches(arch, ["v_mov_b32_e32 v2, 0", "v_cvt_f16_f32_e32 v2, v1"], source, np.uint32)
    expected = torch.from_numpy(source).half().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(source)
    np.testing.assert_array_equal(codes[~nan], expected[~nan])
    back = in_batches(arch, "v_cvt_f32_f16_e32 v2, v1", codes, f32)
    np.testing.assert_array_equal(back, torch.from_numpy(source).half().float().numpy())


def test_bf16_conversions_match_pytorch():
    source = numbers(400)
    codes = in_batches("gfx950", "v_cvt_pk_bf16_f32 v2, v1, v1", source, np.uint32)
    expected = torch.from_numpy(source).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(source)
    np.testing.assert_array_equal(codes[~nan] & 0xFFFF, expected[~nan])
    np.testing.assert_array_equal(codes[~nan] >> 16, expected[~nan])
    assert np.isnan((codes[nan] << 16).view(f32)).all()


EIGHT_BIT = {
    ("gfx942", "fp8"): torch.float8_e4m3fnuz,
    ("gfx942", "bf8"): torch.float8_e5m2fnuz,
    ("gfx950", "fp8"): torch.float8_e4m3fn,
    ("gfx950", "bf8"): torch.float8_e5m2,
    ("gfx1201", "fp8"): torch.float8_e4m3fn,
    ("gfx1201", "bf8"): torch.float8_e5m2,
}


@pytest.mark.parametrize(("arch", "kind"), EIGHT_BIT)
def test_eight_bit_conversions_match_pytorch(arch, kind):
    """Encode numbers in the range, and decode every code."""
    dtype = EIGHT_BIT[arch, kind]
    largest = torch.finfo(dtype).max
    source = numbers(1000)
    source = source[np.abs(source) <= largest]
    expected = torch.from_numpy(source).to(dtype).view(torch.uint8).numpy()
    scaled = [f"v_cvt_scalef32_pk_{kind}_f32 v2, v1, v1, 1.0"] if arch == "gfx950" else []
    for line in (f"v_cvt_pk_{kind}_f32 v2, v1, v1", *scaled):
        codes = in_batches(arch, line, source, np.uint32)
        np.testing.assert_array_equal(codes & 255, expected)
        np.testing.assert_array_equal(codes >> 8 & 255, expected)
    with pytest.raises(UnknownInstruction):
        in_batches(arch, f"v_cvt_scalef32_pk_{kind}_f32 v2, v1, v1, 2.0", source, np.uint32)
    all_codes = np.arange(256, dtype=np.uint32)
    decoded = in_batches(arch, f"v_cvt_f32_{kind}_e32 v2, v1", all_codes, f32)
    np.testing.assert_array_equal(decoded, torch.arange(256).byte().view(dtype).float().numpy())


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize("half", [0, 1])
def test_two_codes_times_a_power_of_two(half, kind):
    all_codes = np.arange(256, dtype=np.uint32)
    pairs = (all_codes[::-1] << 8 | all_codes) << 16 * half | 0x5A5A << 16 * (1 - half)
    expected = torch.arange(256).byte().view(EIGHT_BIT["gfx950", kind]).float().numpy()
    # 0x40400000 is 3.0, of which only the exponent counts.
    for scale, factor in (("1.0", 1), ("4.0", 4), ("-0.5", 0.5), ("0x40400000", 2)):
        line = f"v_cvt_scalef32_pk_f32_{kind} v[2:3], v1, {scale} op_sel:[{half},0,0]"
        np.testing.assert_array_equal(in_batches("gfx950", line, pairs, f32), expected * f32(factor))
        second = [line, "v_mov_b32_e32 v2, v3"]
        np.testing.assert_array_equal(in_batches("gfx950", second, pairs, f32), expected[::-1] * f32(factor))
    with pytest.raises(UnknownInstruction):
        in_batches("gfx942", line, pairs, f32)


@pytest.mark.parametrize(("arch", "kind"), EIGHT_BIT)
def test_eight_bit_overflow(arch, kind):
    """Overflow gives NaN or infinity, or the largest number if MODE.FP16_OVFL is set."""
    dtype = EIGHT_BIT[arch, kind]
    text = f"v_cvt_pk_{kind}_f32 v2, v1, v1"
    state = execute(arch, text, {"v1": f32(1e6)})
    decoded = torch.tensor([int(vector(state, "v2")[0]) & 255], dtype=torch.uint8).view(dtype).float().item()
    assert decoded != decoded or decoded == float("inf")
    register = "HW_REG_WAVE_MODE" if arch == "gfx1201" else "HW_REG_MODE"
    state = execute(arch, [f"s_setreg_imm32_b32 hwreg({register}, 23, 1), 1", text], {"v1": f32(1e6)})
    decoded = torch.tensor([int(vector(state, "v2")[0]) & 255], dtype=torch.uint8).view(dtype).float().item()
    assert decoded == torch.finfo(dtype).max


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_integer_conversions(arch):
    source = np.array([0, 0.5, -0.5, 1.99, -1.99, 2.0**31, -(2.0**31), 2.0**32, -1e30, 1e30, np.nan, np.inf], f32)
    unsigned = in_batches(arch, "v_cvt_u32_f32_e32 v2, v1", source, np.uint32)
    assert list(unsigned) == [0, 0, 0, 1, 0, 2**31, 0, 2**32 - 1, 0, 2**32 - 1, 0, 2**32 - 1]
    signed = in_batches(arch, "v_cvt_i32_f32_e32 v2, v1", source, np.int32)
    top, bottom = 2**31 - 1, -(2**31)
    assert list(signed) == [0, 0, 0, 1, -1, top, bottom, top, bottom, top, 0, top]
    words = np.array([0, 1, 2**24 + 1, 2**24 + 3, 2**31, 2**32 - 1], np.uint32)
    assert list(in_batches(arch, "v_cvt_f32_u32_e32 v2, v1", words, f32)) == [0, 1, 2**24, 2**24 + 4, 2**31, 2**32]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_signs_and_output_modifiers(arch):
    registers = {"v1": f32(-3.0), "v2": f32(2.0), "s4": int(f32(5.0).view(np.uint32))}
    cases = {
        "v_add_f32_e64 v3, |v1|, -v2": 1.0,
        "v_add_f32_e64 v3, -|v1|, s4": 2.0,
        "v_mul_f32_e64 v3, v1, -s4": 15.0,
        "v_add_f32_e64 v3, v1, v2 clamp": 0.0,
        "v_add_f32_e64 v3, v2, v2 clamp": 1.0,
        "v_mul_f32_e64 v3, v1, v2 mul:4": -24.0,
        "v_mul_f32_e64 v3, v1, v2 div:2": -3.0,
        "v_fma_f32 v3, v1, v2, 1.0": -5.0,
        "v_fmac_f32_e32 v2, v1, v1": 11.0,
    }
    for text, expected in cases.items():
        state = execute(arch, text, registers)
        assert vector(state, "v2" if "fmac" in text else "v3", f32)[0] == expected, text


@pytest.mark.parametrize("arch", CDNA)
def test_packed_float32(arch):
    registers = {"v2": f32(1), "v3": f32(2), "v4": f32(10), "v5": f32(20)}
    cases = {
        "v_pk_add_f32 v[6:7], v[2:3], v[4:5]": (11, 22),
        "v_pk_add_f32 v[6:7], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1]": (12, 21),
        "v_pk_mul_f32 v[6:7], v[2:3], v[4:5] op_sel_hi:[1,0]": (10, 20),
        "v_pk_add_f32 v[6:7], v[2:3], v[4:5] neg_lo:[0,1] neg_hi:[1,0]": (-9, 18),
        "v_pk_fma_f32 v[6:7], v[2:3], v[4:5], v[2:3] op_sel_hi:[0,1,1]": (11, 22),
        "v_pk_mov_b32 v[6:7], v[2:3], v[4:5] op_sel:[1,0]": (2, 10),
    }
    for text, expected in cases.items():
        state = execute(arch, text, registers)
        assert (vector(state, "v6", f32)[0], vector(state, "v7", f32)[0]) == expected, text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mixed_precision(arch):
    half = int(f16(0.5).view(np.uint16)) | int(f16(-3).view(np.uint16)) << 16
    registers = {"v1": half, "v2": f32(8), "v3": 0x12345678}
    state = execute(arch, "v_fma_mix_f32 v4, v1, v2, v1 op_sel:[0,0,1] op_sel_hi:[1,0,1]", registers)
    assert vector(state, "v4", f32)[0] == 0.5 * 8 - 3
    state = execute(arch, "v_fma_mixhi_f16 v3, v1, v2, 1.0 op_sel_hi:[1,0,0]", registers)
    assert int(vector(state, "v3")[0]) == int(f16(5).view(np.uint16)) << 16 | 0x5678


def test_dot_products():
    registers = {"v1": 0x80FF7F01, "v2": 0x02020202, "v3": 10}
    state = execute("gfx942", "v_dot4_i32_i8 v4, v1, v2, v3", registers)
    assert vector(state, "v4", np.int32)[0] == 2 * (1 + 127 - 1 - 128) + 10
    state = execute("gfx942", "v_dot4_u32_u8 v4, v1, v2, v3", registers)
    assert int(vector(state, "v4")[0]) == 2 * (1 + 127 + 255 + 128) + 10
    state = execute("gfx1100", "v_dot4_i32_iu8 v4, v1, v2, v3 neg_lo:[1,0,0]", registers)
    assert vector(state, "v4", np.int32)[0] == 2 * (1 + 127 - 1 - 128) + 10
    halves = int(f16(1.5).view(np.uint16)) | int(f16(-2).view(np.uint16)) << 16
    state = execute("gfx942", "v_dot2_f32_f16 v4, v1, v2, v3", {"v1": halves, "v2": halves, "v3": f32(1)})
    assert vector(state, "v4", f32)[0] == 1.5 * 1.5 + 4 + 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transcendental_functions_match_numpy(arch):
    source = np.array([0.0, 1.0, -1.0, 3.5, 0.1, 100.0], f32)
    with np.errstate(all="ignore"):
        for name, function in (
            ("exp", np.exp2),
            ("log", np.log2),
            ("rcp", np.reciprocal),
            ("rsq", lambda x: 1 / np.sqrt(x)),
            ("sqrt", np.sqrt),
        ):
            actual = in_batches(arch, f"v_{name}_f32_e32 v2, v1", source, f32)
            np.testing.assert_allclose(actual, function(source.astype(np.float64)), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rounding_and_scaling(arch):
    source = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.7, -2.7], f32)
    expected = {"rndne": [0, 2, 2, -0.0, -2, 3, -3], "trunc": [0, 1, 2, -0.0, -1, 2, -2]}
    expected |= {"floor": [0, 1, 2, -1, -2, 2, -3], "ceil": [1, 2, 3, -0.0, -1, 3, -2]}
    for name, results in expected.items():
        assert list(in_batches(arch, f"v_{name}_f32_e32 v2, v1", source, f32)) == results, name
    state = execute(arch, "v_ldexp_f32 v2, v1, v3", {"v1": f32(1.5), "v3": -3})
    assert vector(state, "v2", f32)[0] == 0.1875
