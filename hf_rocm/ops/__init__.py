"""One function per operation, each in tiers: aiter → triton → torch → eager.

Shapes use one alphabet: B batch, S length, H query heads, Hkv key/value heads, D head dim.
"""

from hf_rocm.ops.activation import act_and_mul
from hf_rocm.ops.add_norm import add_rms_norm
from hf_rocm.ops.attention import attention
from hf_rocm.ops.decode import decode_attention
from hf_rocm.ops.extend import register
from hf_rocm.ops.linear import linear
from hf_rocm.ops.norm import rms_norm
from hf_rocm.ops.registry import recording
from hf_rocm.ops.rope import rope
from hf_rocm.ops.shuffled import Shuffled, shuffle, shuffled_linear
from hf_rocm.ops.varlen import varlen_attention

__all__ = [
    "Shuffled",
    "act_and_mul",
    "add_rms_norm",
    "attention",
    "decode_attention",
    "linear",
    "recording",
    "register",
    "rms_norm",
    "rope",
    "shuffle",
    "shuffled_linear",
    "varlen_attention",
]
