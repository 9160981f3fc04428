"""Convert numbers of 8-bit weights in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.codes import NVIDIA

_NVIDIA = tl.constexpr(NVIDIA)
# The PTX of `to_fp32` for four numbers q in one register: flipping the highest bit of q gives q + 128.
_INSERT = tl.constexpr(
    "\n".join(
        (
            "{",
            ".reg .b32 bytes;",
            "xor.b32 bytes, $4, 0x80808080;",
            *(f"prmt.b32 ${byte}, bytes, 0x4B000000, 0x744{byte};" for byte in range(4)),
            "}",
        )
    )
)


@triton.jit
def to_fp32(numbers, SELECT: tl.constexpr):
    """Numbers of the weight in fp32. SELECT: the instruction that selects bytes, as in `codes.coded`.

    AMD GPUs convert any byte of a register to a float in one or two instructions. On NVIDIA GPUs, conversions of
    integers are slow: one instruction inserts the byte q + 128 into the float 2²³, whose last bits are an integer.
    """
    if numbers.dtype == tl.int8 and SELECT == _NVIDIA:
        inserted = tl.inline_asm_elementwise(
            _INSERT, "=r,=r,=r,=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=4
        )
        return inserted - 8388736.0
    return numbers.to(tl.float32)


@triton.jit
def to_dtype_of(numbers, values, SELECT: tl.constexpr):
    """Numbers of the weight in the dtype of x, which represents all 8-bit numbers exactly."""
    if numbers.dtype == values.dtype:
        return numbers
    if numbers.dtype == tl.int8 and SELECT != _NVIDIA:
        # 1.5 · 2²³ + q, whose last bits are q. AMD's compiler would combine conversions to fp32 and bf16 into one, for
        # which some GPUs need dozens of instructions.
        summed = (numbers.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
        return summed.to(values.dtype)
    return to_fp32(numbers, SELECT).to(values.dtype)


# Other kernels call the functions of this module.
BUILDS: tuple[Build, ...] = ()
