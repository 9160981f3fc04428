"""ROCm overlay of transformers.models.internvl.modeling_internvl, 4.53 and up.

Served: attention and the RMS norms of the vision tower. The overlay for the language model's type serves the language
model.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.internvl.modeling_internvl import InternVLVisionAttention, InternVLVisionRMSNorm

    from hf_rocm import layers, ops

    overlay.binds(InternVLVisionRMSNorm, layers.RMSNorm(eps="variance_epsilon"))

    @overlay.replaces(InternVLVisionAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def internvl_vision_attention(self, stock, hidden_states, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, **kwargs)
        query, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, S, H · D]
        query, key, value = layers.split_heads((self.q_norm(query), self.k_norm(key), value), self.head_dim)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, {"is_causal": False})
        output, weights = ops.attention(query, key, value, scale=self.scale, **seen)
        return self.projection_dropout(self.projection_layer(output.flatten(2))), weights
