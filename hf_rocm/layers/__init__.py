"""What many models' overlays share: the fused projection, the gated MLP, the RMSNorm, the terms of attention.

An overlay says how its model differs; what is alike lives here once.
"""

from hf_rocm.layers.attention import sees, stays_stock
from hf_rocm.layers.mlp import gated_mlp
from hf_rocm.layers.norm import rms_norm
from hf_rocm.layers.project import project

__all__ = ["gated_mlp", "project", "rms_norm", "sees", "stays_stock"]
