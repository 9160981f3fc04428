"""One function per operation, with implementations in tiers: user → aiter → triton → torch → eager.

Shapes use one alphabet: B batch, S length, H query heads, Hkv key/value heads, D head dim.
"""

from hf_rocm.ops.act import act
from hf_rocm.ops.append_tokens import append_tokens
from hf_rocm.ops.attend_into_cache import attend_into_cache
from hf_rocm.ops.attention import attention
from hf_rocm.ops.begin_step import begin_step
from hf_rocm.ops.decode import decode_attention
from hf_rocm.ops.delta import gated_delta_step
from hf_rocm.ops.delta_prefill import gated_delta_prefill
from hf_rocm.ops.experts_add import experts_add
from hf_rocm.ops.finish_step import finish_step
from hf_rocm.ops.layer_norm import add_layer_norm
from hf_rocm.ops.linear import fused_linear, fused_linear_serves, linear
from hf_rocm.ops.look_up_drafts import look_up_drafts
from hf_rocm.ops.moe import experts
from hf_rocm.ops.moe_mxfp4 import mxfp4_experts
from hf_rocm.ops.moe_shuffled import shuffle_experts, shuffled_experts
from hf_rocm.ops.norm_add import norm_add
from hf_rocm.ops.paged import paged_attention
from hf_rocm.ops.pointwise import act_and_mul, add_rms_norm, rms_norm, rope
from hf_rocm.ops.quantized import quantized_linear
from hf_rocm.ops.registry import recording
from hf_rocm.ops.rope_into_cache import rope_into_cache
from hf_rocm.ops.rotary_angles import rotary_angles
from hf_rocm.ops.routing import choose_experts
from hf_rocm.ops.shuffled import Shuffled, shuffle, shuffled_linear
from hf_rocm.ops.specs.pointwise import Norm
from hf_rocm.ops.user_kernels import register
from hf_rocm.ops.varlen import varlen_attention

__all__ = [
    "Norm",
    "Shuffled",
    "act",
    "act_and_mul",
    "add_layer_norm",
    "add_rms_norm",
    "append_tokens",
    "attend_into_cache",
    "attention",
    "begin_step",
    "choose_experts",
    "decode_attention",
    "experts",
    "experts_add",
    "finish_step",
    "fused_linear",
    "fused_linear_serves",
    "gated_delta_prefill",
    "gated_delta_step",
    "linear",
    "look_up_drafts",
    "mxfp4_experts",
    "norm_add",
    "paged_attention",
    "quantized_linear",
    "recording",
    "register",
    "rms_norm",
    "rope",
    "rope_into_cache",
    "rotary_angles",
    "shuffle",
    "shuffle_experts",
    "shuffled_experts",
    "shuffled_linear",
    "varlen_attention",
]
