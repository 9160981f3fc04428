"""One function per operation, each in tiers: aiter → triton → torch → eager.

Shapes use one alphabet: B batch, S length, H query heads, Hkv key/value heads, D head dim.
"""

from hf_rocm.ops.activation import act_and_mul
from hf_rocm.ops.attention import attention
from hf_rocm.ops.linear import linear
from hf_rocm.ops.norm import rms_norm
from hf_rocm.ops.registry import recording

__all__ = ["act_and_mul", "attention", "linear", "recording", "rms_norm"]
