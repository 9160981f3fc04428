"""Faults that were proven by hand to change nothing, each with its proof: what `equivalent.py` cannot prove."""

from __future__ import annotations

from collections.abc import Mapping

_EXPONENTIAL = "the two differ where exp is below 2^-126 alone, with scaling or without, and 1 + that is 1"
_ONE_ROW = "compiled for one row, whose number is 0: it is a factor of what differs, which nothing else reads"

# (architecture, kernel, instruction, fault): why
PROOFS: Mapping[tuple[str, str, str, str], str] = {
    (
        "gfx90a",
        "act_and_mul_kernel",
        "v_mul_f32_e32 v9, 0x3fb8aa3b, v8",
        "v_add_f32_e32 v9, 0x3fb8aa3b, v8",
    ): _EXPONENTIAL,
    (
        "gfx950",
        "act_and_mul_kernel",
        "v_mul_f32_e64 v10, -v9, s2",
        "v_add_f32_e64 v10, -v9, s2",
    ): _EXPONENTIAL,
    ("gfx950", "rms_norm_kernel", "s_mul_i32 s8, s8, s16", "s_mul_i32 s8, s9, s16"): _ONE_ROW,
    ("gfx1100", "rms_norm_kernel", "s_load_b32 s2, s[0:1], 0x18", "s_load_b32 s2, s[0:1], 0x10"): _ONE_ROW,
    ("gfx950", "flash_kernel", "v_or_b32_e32 v0, 32, v8", "v_or_b32_e32 v0, 32, v10"): (
        "v10 is v8 where vcc is set, and the result is used in the lanes where vcc is set alone"
    ),
    ("gfx1100", "dequantize_eight", "s_ashr_i32 s15, s14, 31", "s_ashr_i32 s15, s14, 30"): (
        "s14 is a workgroup's number, and a launch has fewer than 2^32 threads: both are 0"
    ),
}
