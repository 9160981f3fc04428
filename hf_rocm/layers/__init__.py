"""Shared code of overlays: declared layers, and the building blocks of attention forwards.

An overlay contains only the code that is specific to its model. The code that models share is here.
"""

from hf_rocm.layers.attention import (
    fallback_reason,
    heads,
    project,
    project_out,
    split_heads,
    visible_keys,
)
from hf_rocm.layers.cached_attention import attend, rotate, update_cache
from hf_rocm.layers.cross import encoder_decoder, pack_outputs
from hf_rocm.layers.decoder import PreNormLayer
from hf_rocm.layers.delta import delta_tokens, gated_delta
from hf_rocm.layers.encoder import PostNormOutput, PreNormEncoderLayer, norm_and_sum, norm_of_sum
from hf_rocm.layers.experts import (
    GatedMoE,
    SoftmaxMoE,
    SparseMoE,
    StackedExperts,
    given_experts,
    listed_experts,
    softmax_top,
    untouched,
)
from hf_rocm.layers.mla import latent_heads
from hf_rocm.layers.mlp import GatedMLP, JoinedMLP, PlainMLP, activated
from hf_rocm.layers.norm import RMSNorm, dropout_reason
from hf_rocm.layers.packed import packed
from hf_rocm.layers.release import before, rounded_root
from hf_rocm.layers.rotary import RotaryEmbedding
from hf_rocm.layers.router import GroupedRouter, TopKRouter

__all__ = [
    "GatedMLP",
    "GatedMoE",
    "GroupedRouter",
    "JoinedMLP",
    "PlainMLP",
    "PostNormOutput",
    "PreNormEncoderLayer",
    "PreNormLayer",
    "RMSNorm",
    "RotaryEmbedding",
    "SoftmaxMoE",
    "SparseMoE",
    "StackedExperts",
    "TopKRouter",
    "activated",
    "attend",
    "before",
    "delta_tokens",
    "dropout_reason",
    "encoder_decoder",
    "fallback_reason",
    "gated_delta",
    "given_experts",
    "heads",
    "latent_heads",
    "listed_experts",
    "norm_and_sum",
    "norm_of_sum",
    "pack_outputs",
    "packed",
    "project",
    "project_out",
    "rotate",
    "rounded_root",
    "softmax_top",
    "split_heads",
    "untouched",
    "update_cache",
    "visible_keys",
]
