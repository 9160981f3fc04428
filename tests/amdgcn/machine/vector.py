"""Vector instructions that compute every lane from the same lane of their sources, in a table with one row per
instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats
from .compiling import Compiling, Step
from .operands import constant, vector_reader
from .sources import SATURATING, Destination, Sources
from .state import State

u32, i32, u64, i64, f32, f64, f16 = np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64, np.float16

# name -> (types of the sources, type of the result, function)
TABLE: dict[str, tuple[str, str, Callable[..., np.ndarray]]] = {}


def define(names: str, letters: str, result: str, function: Callable[..., np.ndarray]) -> None:
    for name in names.split():
        TABLE[name] = (letters, result, function)


def _amount(value: np.ndarray) -> np.ndarray:
    return value & value.dtype.type(value.dtype.itemsize * 8 - 1)


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(f64)


def _bit_field(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    width = width & u32(31)
    return value >> (offset & u32(31)) & (u32(1) << width) - u32(1)


def _signed_bit_field(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    field = _bit_field(value, offset, width)
    width = width & u32(31)
    sign = np.where(width == 0, u32(0), u32(1) << (width - u32(1) & u32(31)))
    return (field ^ sign) - sign


def reverse_bits(value: np.ndarray) -> np.ndarray:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
        value = (value >> u32(shift)) & u32(mask) | (value & u32(mask)) << u32(shift)
    return value.byteswap()


def permute_bytes(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    """v_perm_b32: every byte of the result is a byte of {a, b}, a byte filled with a sign bit, 0 or 255."""
    a, b, select = np.broadcast_arrays(a, b, select)
    both = b.astype(u64) | a.astype(u64) << u64(32)
    if (select == select.flat[0]).all():
        return _permute_uniform(both, int(select.flat[0]))
    result = np.zeros(a.shape, u32)
    for place in range(4):
        code = select >> u32(8 * place) & u32(255)
        octet = (both >> ((code & u32(7)) * u32(8)).astype(u64)).astype(u32) & u32(255)
        sign_of = (2 * (code.astype(i64) - 8) + 1) & 7
        sign = (both >> (sign_of * 8 + 7).astype(u64)).astype(u32) & u32(1)
        high = np.where(code < 12, sign * u32(255), np.where(code == 12, u32(0), u32(255)))
        result |= np.where(code < 8, octet, high) << u32(8 * place)
    return result


def _permute_uniform(both: np.ndarray, select: int) -> np.ndarray:
    """v_perm_b32 with the same selector in every lane."""
    result = np.zeros(both.shape, u32)
    for place in range(4):
        code = select >> 8 * place & 255
        if code < 8:
            octet = (both >> u64(8 * code)).astype(u32) & u32(255)
        elif code < 12:
            octet = ((both >> u64(16 * (code - 8) + 15)).astype(u32) & u32(1)) * u32(255)
        else:
            octet = np.full(both.shape, 0 if code == 12 else 255, u32)
        result |= octet << u32(8 * place)
    return result


def _signed24(value: np.ndarray) -> np.ndarray:
    return (value << u32(8)).view(i32) >> i32(8)


def _unsigned24(value: np.ndarray) -> np.ndarray:
    return value & u32(0xFFFFFF)


def _integer_converter(low: int, high: int, dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: floats.to_integer(a, low, high).astype(dtype)


def _median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        median = np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))
        lowest = np.fmin(np.fmin(a, b), c)
        return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), lowest, median)
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.view(np.uint16).astype(u32) | high.view(np.uint16).astype(u32) << u32(16)


def _align(a: np.ndarray, b: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return ((a.astype(u64) << u64(32) | b) >> shift.astype(u64)).astype(u32)


def _toward_zero16(value: np.ndarray) -> np.ndarray:
    """Convert float32 to float16, rounding toward zero."""
    rounded = value.astype(f16)
    over = np.abs(rounded.astype(f32)) > np.abs(value)
    return np.where(over, np.nextafter(rounded, f16(0)), rounded)


def _count_ones(value: np.ndarray) -> np.ndarray:
    return np.bitwise_count(value).astype(u32)


def _leading_zeros(value: np.ndarray) -> np.ndarray:
    """Count leading zeros; 0xffffffff if no bit is set."""
    exponent = np.frexp(value.astype(f64))[1].astype(u32)
    return np.where(value == 0, u32(0xFFFFFFFF), u32(32) - exponent)


def _trailing_zeros(value: np.ndarray) -> np.ndarray:
    return np.where(value == 0, u32(0xFFFFFFFF), np.bitwise_count((value & (~value + u32(1))) - u32(1)).astype(u32))


def _transcendental(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that computes in float64 and rounds once. It flushes subnormal arguments and results."""
    return lambda a: floats.flush32(function(_wide(floats.flush32(a))).astype(f32))


TRANSCENDENTAL = {
    "exp": _transcendental(np.exp2),
    "log": _transcendental(np.log2),
    "rcp": _transcendental(lambda a: 1 / a),
    "rsq": _transcendental(lambda a: 1 / np.sqrt(a)),
    "sqrt": lambda a: np.sqrt(_wide(a)).astype(f32),
    "sin": _transcendental(lambda a: np.sin(a * 2 * np.pi)),
    "cos": _transcendental(lambda a: np.cos(a * 2 * np.pi)),
}
for _name, _function in TRANSCENDENTAL.items():
    define(f"v_{_name}_f32", "f", "f", _function)
define("v_rcp_iflag_f32", "f", "f", TRANSCENDENTAL["rcp"])
for _name, _exact in {"exp": np.exp2, "log": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt}.items():
    define(f"v_{_name}_f16", "h", "h", lambda a, exact=_exact: exact(a.astype(f64)).astype(f16))
define("v_rsq_f16", "h", "h", lambda a: (1 / np.sqrt(a.astype(f64))).astype(f16))

define("v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "u", "u", np.positive)
define("v_add_u32 v_add_nc_u32", "uu", "u", np.add)
define("v_add_i32 v_add_nc_i32", "uu", "u", np.add)
define("v_sub_u32 v_sub_nc_u32 v_sub_i32 v_sub_nc_i32", "uu", "u", np.subtract)
define("v_subrev_u32 v_subrev_nc_u32", "uu", "u", lambda a, b: b - a)
define("v_and_b32", "uu", "u", np.bitwise_and)
define("v_or_b32", "uu", "u", np.bitwise_or)
define("v_xor_b32", "uu", "u", np.bitwise_xor)
define("v_xnor_b32", "uu", "u", lambda a, b: ~(a ^ b))
define("v_not_b32", "u", "u", np.invert)
define("v_lshlrev_b32", "uu", "u", lambda a, b: b << _amount(a))
define("v_lshrrev_b32", "uu", "u", lambda a, b: b >> _amount(a))
define("v_ashrrev_i32", "ii", "i", lambda a, b: b >> _amount(a))
define("v_add3_u32", "uuu", "u", lambda a, b, c: a + b + c)
define("v_and_or_b32", "uuu", "u", lambda a, b, c: a & b | c)
define("v_or3_b32", "uuu", "u", lambda a, b, c: a | b | c)
define("v_xor3_b32", "uuu", "u", lambda a, b, c: a ^ b ^ c)
define("v_xad_u32", "uuu", "u", lambda a, b, c: (a ^ b) + c)
define("v_lshl_add_u32", "uuu", "u", lambda a, b, c: (a << _amount(b)) + c)
define("v_lshl_or_b32", "uuu", "u", lambda a, b, c: a << _amount(b) | c)
define("v_add_lshl_u32", "uuu", "u", lambda a, b, c: (a + b) << _amount(c))
define("v_bfe_u32", "uuu", "u", _bit_field)
define("v_bfe_i32", "uuu", "u", _signed_bit_field)
define("v_bfi_b32", "uuu", "u", lambda a, b, c: a & b | ~a & c)
define("v_bfm_b32", "uu", "u", lambda a, b: ((u32(1) << _amount(a)) - u32(1)) << _amount(b))
define("v_bfrev_b32", "u", "u", reverse_bits)
define("v_bcnt_u32_b32", "uu", "u", lambda a, b: _count_ones(a) + b)
define("v_ffbh_u32 v_clz_i32_u32", "u", "u", _leading_zeros)
define("v_ffbh_i32 v_cls_i32", "i", "u", lambda a: _leading_zeros((a ^ (a >> 31)).view(u32)))
define("v_ffbl_b32 v_ctz_i32_b32", "u", "u", _trailing_zeros)
define("v_perm_b32", "uuu", "u", permute_bytes)
define("v_alignbit_b32", "uuu", "u", lambda a, b, c: _align(a, b, c & u32(31)))
define("v_alignbyte_b32", "uuu", "u", lambda a, b, c: _align(a, b, (c & u32(3)) * u32(8)))
define("v_mul_lo_u32", "uu", "u", np.multiply)
define("v_mul_hi_u32", "uu", "u", lambda a, b: (a.astype(u64) * b >> u64(32)).astype(u32))
define("v_mul_hi_i32", "ii", "i", lambda a, b: (a.astype(i64) * b >> 32).astype(i32))
define("v_mul_u32_u24", "uu", "u", lambda a, b: _unsigned24(a) * _unsigned24(b))
define("v_mad_u32_u24", "uuu", "u", lambda a, b, c: _unsigned24(a) * _unsigned24(b) + c)
define("v_mul_i32_i24", "uu", "i", lambda a, b: _signed24(a) * _signed24(b))
define("v_mad_i32_i24", "uui", "i", lambda a, b, c: _signed24(a) * _signed24(b) + c)
define("v_mad_u32_u16", "wwu", "u", lambda a, b, c: a.astype(u32) * b + c)
define("v_mad_i32_i16", "ssi", "i", lambda a, b, c: a.astype(i32) * b + c)
define("v_sad_u32", "uuu", "u", lambda a, b, c: np.where(a > b, a - b, b - a) + c)

for _letter, _type in (("i", "i32"), ("u", "u32")):
    define(f"v_max_{_type}", _letter * 2, _letter, np.maximum)
    define(f"v_min_{_type}", _letter * 2, _letter, np.minimum)
    define(f"v_max3_{_type}", _letter * 3, _letter, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    define(f"v_min3_{_type}", _letter * 3, _letter, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    define(f"v_med3_{_type}", _letter * 3, _letter, _median)

for _letter, _type in (("f", "f32"), ("h", "f16")):
    define(f"v_add_{_type}", _letter * 2, _letter, np.add)
    define(f"v_sub_{_type}", _letter * 2, _letter, np.subtract)
    define(f"v_subrev_{_type}", _letter * 2, _letter, lambda a, b: b - a)
    define(f"v_mul_{_type}", _letter * 2, _letter, np.multiply)
    define(f"v_max_{_type} v_max_num_{_type}", _letter * 2, _letter, np.fmax)
    define(f"v_min_{_type} v_min_num_{_type}", _letter * 2, _letter, np.fmin)
    _max3, _min3 = (lambda a, b, c: np.fmax(np.fmax(a, b), c)), (lambda a, b, c: np.fmin(np.fmin(a, b), c))
    define(f"v_max3_{_type} v_max3_num_{_type}", _letter * 3, _letter, _max3)
    define(f"v_min3_{_type} v_min3_num_{_type}", _letter * 3, _letter, _min3)
    define(f"v_med3_{_type} v_med3_num_{_type}", _letter * 3, _letter, _median)
    define(f"v_maxmin_{_type} v_maxmin_num_{_type}", _letter * 3, _letter, lambda a, b, c: np.fmin(np.fmax(a, b), c))
    define(f"v_minmax_{_type} v_minmax_num_{_type}", _letter * 3, _letter, lambda a, b, c: np.fmax(np.fmin(a, b), c))
    define(f"v_rndne_{_type}", _letter, _letter, np.rint)
    define(f"v_trunc_{_type}", _letter, _letter, np.trunc)
    define(f"v_floor_{_type}", _letter, _letter, np.floor)
    define(f"v_ceil_{_type}", _letter, _letter, np.ceil)
    define(f"v_fract_{_type}", _letter, _letter, lambda a: a - np.floor(a))

define("v_mul_legacy_f32", "ff", "f", lambda a, b: np.where((a == 0) | (b == 0), f32(0), a * b))
define("v_fma_f32 v_fmac_f32 v_fmaak_f32", "fff", "f", floats.fma32)
define("v_fmamk_f32", "fff", "f", lambda a, k, b: floats.fma32(a, k, b))
define("v_mad_f32 v_mac_f32 v_madak_f32", "fff", "f", lambda a, b, c: floats.flush32(a * b + c))
define("v_madmk_f32", "fff", "f", lambda a, k, b: floats.flush32(a * k + b))
define("v_fma_f16 v_fmac_f16 v_fmaak_f16", "hhh", "h", floats.fma16)
define("v_fmamk_f16", "hhh", "h", lambda a, k, b: floats.fma16(a, k, b))
define("v_ldexp_f32", "fi", "f", lambda a, b: np.ldexp(_wide(a), np.clip(b, -400, 400)).astype(f32))
define("v_ldexp_f16", "hs", "h", lambda a, b: np.ldexp(_wide(a), np.clip(b, -100, 100).astype(i32)).astype(f16))
define("v_frexp_exp_i32_f32", "f", "i", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32))
define("v_frexp_mant_f32", "f", "f", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a).astype(f32))

define("v_cvt_f32_u32", "u", "f", lambda a: a.astype(f32))
define("v_cvt_f32_i32", "i", "f", lambda a: a.astype(f32))
for _place in range(4):
    define(f"v_cvt_f32_ubyte{_place}", "u", "f", lambda a, s=8 * _place: (a >> u32(s) & u32(255)).astype(f32))
define("v_cvt_u32_f32", "f", "u", _integer_converter(0, 2**32 - 1, u32))
define("v_cvt_i32_f32", "f", "i", _integer_converter(-(2**31), 2**31 - 1, i32))
define("v_cvt_f16_f32", "f", "h", lambda a: a.astype(f16))
define("v_cvt_f32_f16", "h", "f", lambda a: a.astype(f32))
define("v_cvt_f16_u16", "w", "h", lambda a: a.astype(f16))
define("v_cvt_f16_i16", "s", "h", lambda a: a.astype(f16))
define("v_cvt_u16_f16", "h", "w", _integer_converter(0, 2**16 - 1, np.uint16))
define("v_cvt_i16_f16", "h", "s", _integer_converter(-(2**15), 2**15 - 1, np.int16))
define("v_cvt_f32_bf16", "w", "f", lambda a: floats.from_bf16(a.astype(u32)))
define("v_cvt_pk_bf16_f32", "ff", "u", lambda a, b: floats.to_bf16(a) | floats.to_bf16(b) << u32(16))
define("v_cvt_pk_f16_f32", "ff", "u", lambda a, b: _pack(*np.broadcast_arrays(a.astype(f16), b.astype(f16))))
define("v_cvt_pkrtz_f16_f32 v_cvt_pk_rtz_f16_f32", "ff", "u", lambda a, b: _pack(*map(_toward_zero16, (a, b))))
define("v_pack_b32_f16", "ww", "u", _pack)

define("v_lshlrev_b16", "ww", "w", lambda a, b: b << _amount(a))
define("v_lshrrev_b16", "ww", "w", lambda a, b: b >> _amount(a))
define("v_ashrrev_i16", "ss", "s", lambda a, b: b >> _amount(a))
define("v_add_u16 v_add_nc_u16", "ww", "w", np.add)
define("v_sub_u16 v_sub_nc_u16", "ww", "w", np.subtract)
define("v_mul_lo_u16", "ww", "w", np.multiply)
define("v_mad_u16 v_mad_legacy_u16", "www", "w", lambda a, b, c: a * b + c)
define("v_max_u16", "ww", "w", np.maximum)
define("v_min_u16", "ww", "w", np.minimum)
define("v_max_i16", "ss", "s", np.maximum)
define("v_min_i16", "ss", "s", np.minimum)
define("v_and_b16", "ww", "w", np.bitwise_and)
define("v_or_b16", "ww", "w", np.bitwise_or)
define("v_xor_b16", "ww", "w", np.bitwise_xor)

# Instructions whose last source is their destination.
_ACCUMULATE = {"v_fmac_f32", "v_fmac_f16", "v_mac_f32"}
# CDNA's 16-bit instructions that preserve the other half of the register.
_PRESERVE = {"v_fma_f16", "v_mad_u16", "v_max3_f16", "v_min3_f16", "v_med3_f16"}
_SHIFTS = {"v_lshlrev_b32": np.left_shift, "v_lshrrev_b32": np.right_shift, "v_ashrrev_i32": np.right_shift}


def compile_vector(c: Compiling) -> Step | None:
    if c.base not in TABLE:
        return None
    letters, result, function = TABLE[c.base]
    texts = list(c.instruction.operands[1:])
    if c.base in _ACCUMULATE:
        texts.append(c.instruction.operands[0])
    if len(texts) != len(letters):
        raise c.refuse(f"expected {len(letters)} sources, got {len(texts)}")
    if c.base in SATURATING and c.take("clamp", False):
        function = SATURATING[c.base]
    sources = Sources(c, texts, letters)
    destination = Destination(c, c.operands[0], result, sources, preserves=c.base in _PRESERVE)
    if destination.plain and not c.sdwa:
        if c.base in _SHIFTS and sources.operands[0].kind == "constant":
            return _shift_by_constant(c, sources, _SHIFTS[c.base], result)
        if isinstance(function, np.ufunc):
            return _direct(function, sources.readers, destination.register, result)
        register, readers = destination.register, sources.readers
        return lambda state: state.put(register, function(*[reader(state) for reader in readers]))
    return lambda state: destination.put(state, function(*sources(state)))


def _direct(function: np.ufunc, readers: list[Any], register: int, result: str) -> Step:
    """A step that writes a ufunc's result directly to the register."""
    bank = {"u": "v", "f": "vf", "i": "vi"}[result]
    if function is np.positive:
        read = readers[0]
        return lambda state: np.copyto(state.v[register], read(state), where=state.where)
    if len(readers) == 1:
        read = readers[0]

        def unary(state: State) -> None:
            function(read(state), out=getattr(state, bank)[register], where=state.where)

        return unary
    first, second = readers

    def step(state: State) -> None:
        function(first(state), second(state), out=getattr(state, bank)[register], where=state.where)

    return step


def _shift_by_constant(c: Compiling, sources: Sources, function: np.ufunc, letter: str) -> Step:
    amount = _amount(constant(sources.operands[0], letter))[:, None]
    return _direct(function, [sources.readers[1], lambda state: amount], c.operands[0].register, letter)


def compile_scalar_transcendental(c: Compiling) -> Step | None:
    """v_s_exp_f32 and the other transcendental instructions of gfx12 that write a scalar register."""
    name = c.base.removeprefix("v_s_").removesuffix("_f32")
    if not c.base.startswith("v_s_") or name not in TRANSCENDENTAL or c.target.generation < 12:
        return None
    function, read, register = TRANSCENDENTAL[name], vector_reader(c.operands[1], "f"), c.operands[0].register
    return lambda state: state.put_scalar(register, function(read(state)).view(u32)[:, 0])
