"""Proofs by hand for faults that change nothing, but for which `equivalent.py` finds no proof."""

from __future__ import annotations

from collections.abc import Mapping

_EXPONENTIAL = "the results differ only where exp is below 2^-126, with or without scaling, and then 1 + exp is 1"
_ONE_ROW = "compiled for one row, whose index 0 is a factor of the only value that differs"

# (architecture, kernel, instruction, faulty instruction): proof
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
        "v10 equals v8 where vcc is set, and the result is used only in lanes where vcc is set"
    ),
    ("gfx1100", "dequantize_eight", "s_ashr_i32 s15, s14, 31", "s_ashr_i32 s15, s14, 30"): (
        "s14 is a workgroup's index, below 2^30 because a launch has fewer than 2^32 threads: both shifts return 0"
    ),
    ("gfx90a", "chosen_down", "v_mov_b32_e32 v7, v2", "v_mov_b32_e32 v8, v2"): (
        "v8 is overwritten next, and v7 differs only in the upper four of every eight lanes, whose sum is not read"
    ),
    ("gfx942", "decode_kernel", "s_and_b64 vcc, s[0:1], s[20:21]", "s_or_b64 vcc, s[0:1], s[20:21]"): (
        "S_q is a multiple of 16 in this variant, so 32 divides the number of rows and none is masked; more lanes "
        "store the same values"
    ),
    ("gfx942", "dequantize_eight", "v_lshl_or_b32 v0, s15, 7, v0", "v_lshl_or_b32 v0, s15, 3, v0"): (
        "compiled for K up to 128, which one program covers, so s15, its index, is 0"
    ),
    ("gfx942", "act_and_mul_kernel", "v_bfrev_b32_e32 v7, 1", "v_bfrev_b32_e32 v7, 0"): (
        "the offset of masked lanes, but compiled for 128 columns, which one program covers: no lane is masked"
    ),
    ("gfx1100", "_attn_fwd", "v_mul_f32_e32 v1, 0x4f7ffffe, v1", "v_mul_f32_e32 v1, 0x4f7ffbfe, v1"): (
        "the estimated reciprocal is smaller by 2^-14, which a Newton step squares; the quotient of a workgroup's "
        "index, below 2^25, is too small by at most 1, and two corrections follow"
    ),
    (
        "gfx1201",
        "chosen_gate_up",
        "v_dual_sub_f32 v10, 0, v4 :: v_dual_sub_f32 v11, 0, v5",
        "v_dual_sub_f32 v10, 0, v4 :: v_dual_sub_f32 v11, 1, v5",
    ): "the difference is below 2^-148, and only for a gate below 2^-124, whose exponential is 1 in both cases",
    ("gfx1201", "few_rows", "s_cmp_gt_i32 s97, 0", "s_cmp_gt_i32 s97, 1"): (
        "s97 is K - 512, and K is a multiple of 16 in this variant"
    ),
    ("gfx1201", "chosen_gate_up", "v_mov_b32_e32 v3, 0", "v_mov_b32_e32 v3, 1"): (
        "the first 32 lanes load v3 later, and only these lanes (whole quads) are added and stored"
    ),
    ("gfx1201", "_attn_fwd", "s_or_b32 s7, s39, s7", "s_or_b32 s7, s41, s7"): (
        "a mask of keys beyond the last one, which the causal mask hides from all rows that are stored"
    ),
    ("gfx1201", "_attn_fwd", "v_add_co_u32 v65, s4, v65, s28", "v_add_co_u32 v66, s4, v65, s28"): (
        "the pointer to the next masked block, but without a causal mask only the last block is masked"
    ),
    ("gfx1201", "_attn_fwd", "s_add_co_i32 s1, s36, 30", "s_add_co_i32 s1, s36, 28"): (
        "matters only for one or two keys; it sets rows below 1 - S to 0, and there are none because S is at least 1"
    ),
}
