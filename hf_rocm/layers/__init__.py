"""What many models' overlays share: heads, rotary positions, the cache, the gated MLP, norms, the terms of attention.

An overlay says how its model differs; what is alike lives here once.
"""

from hf_rocm.layers.attention import sees, stays_stock
from hf_rocm.layers.cross import answered, encoder_decoder
from hf_rocm.layers.decoder import decoder_layer
from hf_rocm.layers.experts import given_experts, listed_experts, softmax_top, stacked_experts, untouched
from hf_rocm.layers.heads import heads, remember, rotate, rotate_and_remember
from hf_rocm.layers.latent import latent_heads
from hf_rocm.layers.mlp import activated, gated_mlp, joined_mlp
from hf_rocm.layers.norm import rms_norm
from hf_rocm.layers.packed import packed
from hf_rocm.layers.project import project, project_out, split_heads
from hf_rocm.layers.release import before

__all__ = [
    "activated",
    "answered",
    "before",
    "decoder_layer",
    "encoder_decoder",
    "gated_mlp",
    "given_experts",
    "heads",
    "joined_mlp",
    "latent_heads",
    "listed_experts",
    "packed",
    "project",
    "project_out",
    "remember",
    "rms_norm",
    "rotate",
    "rotate_and_remember",
    "sees",
    "softmax_top",
    "split_heads",
    "stacked_experts",
    "stays_stock",
    "untouched",
]
