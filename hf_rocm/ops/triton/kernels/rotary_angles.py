"""cos and sin of position · frequency, every angle computed once."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build


@triton.jit
def rotary_angles_kernel(
    inv_freq,
    positions,
    cos,
    sin,
    rows,
    # Row r is token (r // length, r % length).
    length,
    batch_stride,
    token_stride,
    scaling,
    FREQUENCIES: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Must be compiled without contraction: the angle has to be rounded before its range is reduced.
    dtype: tl.constexpr = cos.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = (row // length).to(tl.int64) * batch_stride + (row % length).to(tl.int64) * token_stride
    position = tl.load(positions + place, mask=row < rows, other=0).to(tl.float32)
    frequency = tl.load(inv_freq + column, mask=column < FREQUENCIES, other=0.0).to(tl.float32)
    angle = position * frequency
    angle_cos = (tl.cos(angle) * scaling).to(dtype)
    angle_sin = (tl.sin(angle) * scaling).to(dtype)
    valid = (row < rows) & (column < FREQUENCIES)
    if LAYOUT == "once":
        out = row.to(tl.int64) * FREQUENCIES + column
    elif LAYOUT == "pairs":
        out = row.to(tl.int64) * (2 * FREQUENCIES) + 2 * column
        tl.store(cos + out + 1, angle_cos, mask=valid)
        tl.store(sin + out + 1, angle_sin, mask=valid)
    else:
        tl.static_assert(LAYOUT == "halves")
        out = row.to(tl.int64) * (2 * FREQUENCIES) + column
        tl.store(cos + out + FREQUENCIES, angle_cos, mask=valid)
        tl.store(sin + out + FREQUENCIES, angle_sin, mask=valid)
    tl.store(cos + out, angle_cos, mask=valid)
    tl.store(sin + out, angle_sin, mask=valid)


def _build(frequencies: int, rows: int, threads: int, layout: str = "halves", dtype: str = "bf16") -> Build:
    return Build(
        rotary_angles_kernel,
        {
            "inv_freq": "*fp32",
            "positions": "*i64",
            "cos": f"*{dtype}",
            "sin": f"*{dtype}",
            "rows": "i32",
            "length": "i32",
            "batch_stride": "i32",
            "token_stride": "i32",
            "scaling": "fp32",
        },
        {
            "FREQUENCIES": frequencies,
            "LAYOUT": layout,
            "ROWS": rows,
            "BLOCK": triton.next_power_of_2(frequencies),
        },
        threads=threads,
        options={"enable_fp_fusion": False},
    )


BUILDS = (
    _build(64, 1, 64),
    _build(64, 8, 128),
    _build(128, 4, 128, dtype="fp32"),
    _build(32, 1, 64, layout="once"),  # gpt-oss
    _build(64, 8, 128, layout="pairs", dtype="fp16"),  # Cohere
    _build(40, 8, 128),
)
