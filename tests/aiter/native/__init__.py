"""Stand-ins for aiter's compiled kernels: slow, correct and strict.

They raise if the real kernel would read wrong data (unsupported strides, a weight of another dtype) or would silently
lose a gradient. They also raise for arguments that they do not support. The environment variable `STANDIN_BROKEN`
contains the path of a file. If this file contains `name:fault`, the kernel `name` has this fault, for example `nan` or
`crash`.
"""

from __future__ import annotations

import enum
from typing import Any

from .attention import (
    attend,
    check_attention,
    fmha_v3_bwd,
    fmha_v3_fwd,
    fmha_v3_varlen_fwd,
    mha_bwd,
    mha_fwd,
    mha_varlen_fwd,
)
from .matrices import (
    check_rows,
    gelu_and_mul,
    gelu_tanh_and_mul,
    gemm_a16w16_asm,
    get_padded_m,
    hipb_create_extension,
    hipb_mm,
    rmsnorm2d_fwd,
    rmsnorm2d_fwd_with_add,
    rope_cached_2c_fwd_impl,
    silu_and_mul,
    wv_splitk_small_fp16_bf16,
)
from .moe import ck_moe_stage1, ck_moe_stage2, moe_sorting_fwd
from .quantized import gemm_a8w8, gemm_a8w8_bpreshuffle
from .strict import CALLS, Call, WrongCall, leaf, need

__all__ = [
    "CALLS",
    "ActivationType",
    "Call",
    "QuantType",
    "WrongCall",
    "attend",
    "check_attention",
    "check_rows",
    "ck_moe_stage1",
    "ck_moe_stage2",
    "fmha_v3_bwd",
    "fmha_v3_fwd",
    "fmha_v3_varlen_fwd",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemm_a8w8",
    "gemm_a8w8_bpreshuffle",
    "gemm_a16w16_asm",
    "get_padded_m",
    "hipb_create_extension",
    "hipb_mm",
    "leaf",
    "mha_bwd",
    "mha_fwd",
    "mha_varlen_fwd",
    "moe_sorting_fwd",
    "need",
    "of_module",
    "rmsnorm2d_fwd",
    "rmsnorm2d_fwd_with_add",
    "rope_cached_2c_fwd_impl",
    "silu_and_mul",
    "wv_splitk_small_fp16_bf16",
]


# aiter skips its check of signatures if a docstring starts with "Members:", like that of a pybind11 enum.
class ActivationType(enum.IntEnum):
    """Members:"""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(enum.IntEnum):
    """Members:"""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


def of_module(compiled: str) -> dict[str, Any]:
    """The functions of one compiled module, or the enums if it is not in MODULES.

    Names are compared by prefix, because aiter builds attention once per variant and appends the variant to the name.
    """
    for prefix, names in MODULES.items():
        if compiled.startswith(prefix):
            return {name: leaf(globals()[name]) for name in names}
    return {"ActivationType": ActivationType, "QuantType": QuantType}


MODULES: dict[str, tuple[str, ...]] = {
    "mha_fwd": ("mha_fwd",),
    "module_mha_fwd": ("mha_fwd",),
    "module_fmha_v3_fwd": ("fmha_v3_fwd",),
    "mha_varlen_fwd": ("mha_varlen_fwd",),
    "module_mha_varlen_fwd": ("mha_varlen_fwd",),
    "mha_bwd": ("mha_bwd",),
    "module_mha_bwd": ("mha_bwd",),
    "module_fmha_v3_bwd": ("fmha_v3_bwd",),
    "module_activation": ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"),
    "module_rmsnorm": ("rmsnorm2d_fwd", "rmsnorm2d_fwd_with_add"),
    "module_rope_general_fwd": ("rope_cached_2c_fwd_impl",),
    "module_fmha_v3_varlen_fwd": ("fmha_v3_varlen_fwd",),
    "module_moe_sorting": ("moe_sorting_fwd",),
    "module_moe_ck2stages": ("ck_moe_stage1", "ck_moe_stage2"),
    "module_custom": ("wv_splitk_small_fp16_bf16",),
    "module_hipbsolgemm": ("hipb_create_extension", "hipb_mm"),
    "module_gemm_a16w16_asm": ("gemm_a16w16_asm",),
    "module_gemm_a8w8_bpreshuffle": ("gemm_a8w8_bpreshuffle",),
    "module_gemm_a8w8": ("gemm_a8w8",),
}
